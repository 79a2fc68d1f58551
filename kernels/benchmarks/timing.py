"""Timing of GPU work: CUDA graph replays, so that launches from Python stay out, and eager calls beside them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch


class Timing(NamedTuple):
    """Milliseconds a call: median, 10th and 90th percentile, how measured, and the median of eager calls."""

    median: float
    low: float
    high: float
    method: str
    eager: float


def _events(call: Callable[[], object], repeats: int, inner: int) -> list[float]:
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / inner)
    return times


def _capture(call: Callable[[], object], inner: int) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            call()
    return graph


def measure(call: Callable[[], object], budget_ms: float = 100.0) -> Timing:
    """Time ``call`` for about ``budget_ms``; graph replay where the call can be captured."""
    call()
    torch.cuda.synchronize()
    eager = _events(call, 5, 1)
    guess = max(min(eager), 0.005)
    inner = max(1, min(20, int(2.0 / guess)))
    repeats = max(7, min(50, int(budget_ms / (guess * inner))))
    method = "graph"
    try:
        graph = _capture(call, inner)
        graph.replay()
        torch.cuda.synchronize()
        times = _events(graph.replay, repeats, inner)
    except Exception:
        torch.cuda.synchronize()
        method, times = "events", _events(call, repeats, 1)
    cuts = statistics.quantiles(times, n=10)
    return Timing(statistics.median(times), cuts[0], cuts[-1], method, statistics.median(eager))


def ceiling(device: torch.device) -> float:
    """bf16 matrix product of 8192 cubed on random data, FLOP/s."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / (measure(lambda: a @ b).median * 1e-3)
