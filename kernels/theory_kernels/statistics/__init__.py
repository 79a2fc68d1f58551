"""Statistics of attention maps that are never held: masses, entropies, zeros, survivors, score moments."""

from .api import attention_statistics
from .results import AttentionStatistics, ScoreStatistics, ViewStatistics

__all__ = ["AttentionStatistics", "ScoreStatistics", "ViewStatistics", "attention_statistics"]
