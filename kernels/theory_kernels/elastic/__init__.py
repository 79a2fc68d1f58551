"""Elastic threshold attention: the soft mask that training uses, and hard pruning by the same thresholds."""

from .api import elastic_attention

__all__ = ["elastic_attention"]
