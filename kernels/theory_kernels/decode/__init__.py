"""Elastic decoding: a KV cache of which only the blocks that can matter are read."""

from .api import elastic_decode
from .bounds import BlockBounds, make_block_bounds, update_block_bounds
from .problem import DecodeStatistics

__all__ = ["BlockBounds", "DecodeStatistics", "elastic_decode", "make_block_bounds", "update_block_bounds"]
