"""Images of any window of an attention map, and its sparse rows, without holding the map."""

from .api import SparseRows, pooled_map, row_normalizers, sparse_rows

__all__ = ["SparseRows", "pooled_map", "row_normalizers", "sparse_rows"]
