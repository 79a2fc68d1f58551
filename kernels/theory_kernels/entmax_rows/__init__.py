"""alpha-entmax of rows, any alpha, and functions that stand in for those of the ``entmax`` package."""

from .api import entmax
from .compat import entmax15, entmax_bisect, sparsemax, sparsemax_bisect

__all__ = ["entmax", "entmax15", "entmax_bisect", "sparsemax", "sparsemax_bisect"]
