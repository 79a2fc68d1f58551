"""Blocks computed side by side, one thread of torch each.

Every operation on a tile of a few hundred kilobytes would otherwise start and join torch's own threads: that costs
a good part of the time on an idle machine, and far more on a busy one, where they wait for each other.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

A = TypeVar("A")
B = TypeVar("B")

_LOCK = threading.Lock()
_INSIDE = [0, 1]


@contextmanager
def _one_torch_thread() -> Iterator[int]:
    """Torch runs single-threaded inside; gives the number of threads it had. The last to leave restores it."""
    with _LOCK:
        if _INSIDE[0] == 0:
            _INSIDE[1] = torch.get_num_threads()
            torch.set_num_threads(1)
        _INSIDE[0] += 1
    try:
        yield _INSIDE[1]
    finally:
        with _LOCK:
            _INSIDE[0] -= 1
            if _INSIDE[0] == 0:
                torch.set_num_threads(_INSIDE[1])


def in_order(function: Callable[[A], B], items: Iterable[A], side_by_side: bool) -> Iterator[tuple[A, B]]:
    """(item, function(item)) in the order of the items, a few of them computed at once."""
    if not side_by_side or torch.get_num_threads() == 1:
        for item in items:
            yield item, function(item)
        return
    with _one_torch_thread() as threads:
        # A thread's OpenMP and MKL have counts of their own; with more than one, MKL's products differ in their bits.
        pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
        try:
            waiting: deque[tuple[A, Future[B]]] = deque()
            for item in items:
                waiting.append((item, pool.submit(function, item)))
                if len(waiting) > 2 * threads:
                    first, future = waiting.popleft()
                    yield first, future.result()
            for first, future in waiting:
                yield first, future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
