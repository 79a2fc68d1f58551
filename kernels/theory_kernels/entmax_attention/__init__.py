"""alpha-entmax attention with a temperature for each row."""

from .api import entmax_attention

__all__ = ["entmax_attention"]
