"""Kernels for attention with exact zeros: threshold attention, survivor counts, noise exceedances, map statistics.

Triton is imported only when a kernel is first used; everything here also runs in plain torch.
"""

from .attention import differential_threshold_attention, threshold_attention
from .counts import consensus_counts, survivor_counts
from .decode import BlockBounds, DecodeStatistics, elastic_decode, make_block_bounds, update_block_bounds
from .elastic import elastic_attention
from .entmax_attention import entmax_attention
from .entmax_rows import entmax
from .exceedance import Exceedances, Noise, exceedance_counts
from .maps import SparseRows, pooled_map, row_normalizers, sparse_rows
from .statistics import AttentionStatistics, ScoreStatistics, ViewStatistics, attention_statistics

__all__ = [
    "AttentionStatistics",
    "BlockBounds",
    "DecodeStatistics",
    "Exceedances",
    "Noise",
    "ScoreStatistics",
    "SparseRows",
    "ViewStatistics",
    "attention_statistics",
    "consensus_counts",
    "differential_threshold_attention",
    "elastic_attention",
    "elastic_decode",
    "entmax",
    "entmax_attention",
    "exceedance_counts",
    "make_block_bounds",
    "pooled_map",
    "row_normalizers",
    "sparse_rows",
    "survivor_counts",
    "threshold_attention",
    "update_block_bounds",
]
