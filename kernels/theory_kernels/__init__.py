"""Kernels for attention with exact zeros: threshold attention, survivor counts, noise exceedances, map statistics.

Triton is imported only when a kernel is first used; everything here also runs in plain torch.
"""

from .attention import differential_threshold_attention, threshold_attention
from .counts import consensus_counts, survivor_counts
from .exceedance import Exceedances, Noise, exceedance_counts
from .maps import SparseRows, pooled_map, row_normalizers, sparse_rows
from .statistics import AttentionStatistics, ScoreStatistics, ViewStatistics, attention_statistics

__all__ = [
    "AttentionStatistics",
    "Exceedances",
    "Noise",
    "ScoreStatistics",
    "SparseRows",
    "ViewStatistics",
    "attention_statistics",
    "consensus_counts",
    "differential_threshold_attention",
    "exceedance_counts",
    "pooled_map",
    "row_normalizers",
    "sparse_rows",
    "survivor_counts",
    "threshold_attention",
]
