"""Kernels for attention with exact zeros: threshold attention, survivor counts, noise exceedances.

Triton is imported only when a kernel is first used; everything here also runs in plain torch.
"""

from .attention import differential_threshold_attention, threshold_attention
from .counts import consensus_counts, survivor_counts
from .exceedance import Exceedances, Noise, exceedance_counts

__all__ = [
    "Exceedances",
    "Noise",
    "consensus_counts",
    "differential_threshold_attention",
    "exceedance_counts",
    "survivor_counts",
    "threshold_attention",
]
