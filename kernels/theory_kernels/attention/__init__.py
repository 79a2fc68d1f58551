"""Threshold rectified and threshold differential attention."""

from .api import differential_threshold_attention, threshold_attention

__all__ = ["differential_threshold_attention", "threshold_attention"]
