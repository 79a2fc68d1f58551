"""Survivors and consensus survivors of real score matrices, counted without holding a score matrix."""

from .api import consensus_counts, survivor_counts

__all__ = ["consensus_counts", "survivor_counts"]
