"""Time elastic decoding against dense decoding, each only after it has passed its correctness gate.

    python kernels/benchmarks/decode.py --out decode.csv [--length 524288] [--tune] [--trained FILE]

One query a head over a cache of which a given share of the blocks has to be read. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import math
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from theory_kernels import BlockBounds, elastic_decode, make_block_bounds, threshold_attention, update_block_bounds
from theory_kernels.decode import launch
from timing import measure
from torch.nn.attention import SDPBackend, sdpa_kernel

FIELDS = (
    "case", "pattern", "mechanism", "density", "read", "kind", "block", "batch", "heads", "groups", "length", "dim",
    "dtype", "ms", "ms_p10", "ms_p90", "method", "eager_ms", "tb_per_s", "metadata", "error", "allowed", "gpu", "date",
    "torch", "triton", "note",
)  # fmt: skip
# Scores of the planted keys, thresholds, and standard deviation of the entries of all others.
PLANTED, TAU, SMALL = 6.0, 4.0, 0.1
COPIES = 4


class Cache:
    """A cache with one key of score ``PLANTED`` in each block of a chosen set, a different one for each head."""

    def __init__(self, length: int, heads: int, groups: int, dim: int, dtype: torch.dtype, device: torch.device):
        self.generator = torch.Generator(device).manual_seed(0)
        self.q, self.k, self.v = (
            torch.randn((1, h, t, dim), generator=self.generator, device=device).to(dtype)
            for h, t in ((heads, 1), (groups, length), (groups, length))
        )
        self.k *= SMALL
        self.heads, self.groups, self.length, self.dim = heads, groups, length, dim

    def plant(self, density: float, pattern: str, block: int, one: bool = False) -> torch.Tensor:
        """A copy of the keys of which all (or ``one``) survive in ``density`` of the blocks of each head."""
        k = self.k.clone()
        blocks = self.length // block
        for g in range(self.groups):
            share = density
            if pattern == "uneven":
                # Heads from nothing to twice the density.
                share = min(1.0, 2 * density * g / max(self.groups - 1, 1))
            count = round(share * blocks)
            if pattern == "clustered":
                run = 64
                first = torch.randperm(blocks // run, generator=self.generator, device=k.device)[: count // run]
                chosen = (first[:, None] * run + torch.arange(run, device=k.device)).flatten()
            else:
                chosen = torch.randperm(blocks, generator=self.generator, device=k.device)[:count]
            at = chosen * block
            if one:
                at += torch.randint(block, chosen.shape, generator=self.generator, device=k.device)
            else:
                at = (at[:, None] + torch.arange(block, device=k.device)).flatten()
            q = self.q[0, g * (self.heads // self.groups), 0].float()
            k[0, g, at] += (q * (PLANTED * math.sqrt(self.dim) / q.square().sum())).to(k.dtype)
        return k


def gate(
    call: Callable[[], torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tau: torch.Tensor
) -> tuple[float, float]:
    """Relative error and what is allowed: 2 (that of the reference in low precision + rounding), over every head."""
    got = call().double()
    wrong = low = size = 0.0
    group = q.shape[1] // k.shape[1]
    for g in range(k.shape[1]):
        rows = slice(g * group, (g + 1) * group)
        cut = (q[:, rows], k[:, g : g + 1], v[:, g : g + 1])
        exact = elastic_decode(*(x.double() for x in cut), None, tau[:, rows], implementation="reference")
        eager = elastic_decode(*cut, None, tau[:, rows], implementation="reference")
        wrong += float((got[:, rows] - exact).square().sum())
        low += float((eager.double() - exact).square().sum())
        size += float(exact.square().sum())
    size = math.sqrt(size)
    allowed = 2 * (math.sqrt(low) + torch.finfo(q.dtype).eps * size)
    return (math.sqrt(wrong) / size, allowed / size) if size else (math.sqrt(wrong), 0.0)


class Bench:
    """Collects rows."""

    def __init__(self, out: Path):
        out.parent.mkdir(parents=True, exist_ok=True)
        self.file = out.open("w", newline="")
        self.writer = csv.DictWriter(self.file, FIELDS)
        self.writer.writeheader()
        self.common = {
            "gpu": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat(),
            "torch": torch.__version__, "triton": triton.__version__,
        }  # fmt: skip

    def write(self, row: dict) -> None:
        row = {k: f"{v:.5g}" if isinstance(v, float) else v for k, v in {**self.common, **row}.items()}
        self.writer.writerow(row)
        self.file.flush()
        shown = (
            "case",
            "pattern",
            "mechanism",
            "density",
            "read",
            "kind",
            "block",
            "ms",
            "eager_ms",
            "tb_per_s",
            "note",
        )
        print(" ".join(f"{row.get(k, '')!s:>9}" for k in shown), flush=True)

    def time(
        self, row: dict, call: Callable[[], object], read: float | None, error: tuple[float, float] | None
    ) -> float:
        """Time ``call``, which has to read ``read`` bytes, if its error allows; median milliseconds, or infinity."""
        if error is not None:
            row |= {"error": error[0], "allowed": error[1]}
            if not error[0] <= error[1]:
                self.write({**row, "note": "gate failed"})
                return math.inf
        try:
            timing = measure(call)
        except Exception as failure:
            torch.cuda.synchronize()
            self.write({**row, "note": f"not run: {type(failure).__name__}: {str(failure)[:80]}"})
            return math.inf
        rate = {} if read is None else {"tb_per_s": read / (timing.median * 1e-3) / 1e12}
        self.write({
            **row, "ms": timing.median, "ms_p10": timing.low, "ms_p90": timing.high, "method": timing.method,
            "eager_ms": timing.eager, **rate,
        })  # fmt: skip
        return timing.median


def _facts(cache: Cache) -> dict:
    return {
        "batch": 1, "heads": cache.heads, "groups": cache.groups, "length": cache.length, "dim": cache.dim,
        "dtype": str(cache.q.dtype).removeprefix("torch."),
    }  # fmt: skip


SCREEN = launch.screen_options
PEERS = {"FA2": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


def dense(bench: Bench, cache: Cache, names: tuple[str, ...] = tuple(PEERS), case: str = "dense") -> None:
    """FlashAttention-2 and cuDNN of torch over the whole cache."""
    q, k, v = cache.q, cache.k, cache.v
    size = (k.numel() + v.numel()) * k.element_size()
    for name in names:
        backend = PEERS[name]

        def call(backend: SDPBackend = backend) -> torch.Tensor:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        row = {"case": case, "pattern": "random", "mechanism": name, "density": 1.0, **_facts(cache)}
        try:
            error = gate(call, q, k, v, torch.full((1, cache.heads, 1), -math.inf, device=q.device))
        except Exception as failure:
            bench.write({**row, "note": f"not run: {type(failure).__name__}: {str(failure)[:80]}"})
            continue
        bench.time(row, call, size, error)


def ours(
    bench: Bench, cache: Cache, k: torch.Tensor, bounds: BlockBounds | None, density: float, pattern: str, case: str,
    gated: bool = True, note: str = "",
) -> float:  # fmt: skip
    """Elastic decoding with the softmax over survivors."""
    q, v = cache.q, cache.v
    lengths = torch.full((1,), cache.length, dtype=torch.int32, device=q.device)
    tau = torch.full((1, cache.heads, 1), TAU if bounds is not None else -math.inf, device=q.device)

    def call() -> torch.Tensor:
        out = elastic_decode(q, k, v, bounds, tau, lengths=lengths)
        assert isinstance(out, torch.Tensor)
        return out

    row = {
        "case": case, "pattern": pattern, "mechanism": "elastic", "density": density,
        "kind": bounds.kind if bounds else "none", "block": bounds.block if bounds else 64, "note": note,
        **_facts(cache),
    }  # fmt: skip
    _, found = elastic_decode(q, k, v, bounds, tau, lengths=lengths, return_statistics=True)
    block = row["block"]
    share = float(found.blocks_read.sum()) * block / (cache.length * cache.groups)
    total = (k.numel() + v.numel()) * k.element_size()
    size = share * total
    if bounds is not None:
        row["metadata"] = bounds.nbytes / total
        size += bounds.nbytes
    row["read"] = share
    error = gate(call, q, k, v, tau) if gated else None
    return bench.time(row, call, size, error)


def values(bench: Bench, cache: Cache) -> None:
    """No bound screens anything, and a share of the keys survives: their values alone are read, or (eager) all."""
    q, k, v = cache.q, cache.k, cache.v
    group = cache.heads // cache.groups
    part = slice(0, 1 << 17)
    score = (q.float() @ k[:, :, part].float().repeat_interleave(group, 1).transpose(-1, -2)) * cache.dim**-0.5
    for share in (1.0, 0.38, 0.1, 0.01, 0.001):
        tau = torch.full((1, cache.heads, 1), -math.inf, device=q.device)
        if share < 1:
            tau = score.kthvalue(round((1 - share) * score.shape[-1]), -1).values
        for lazy in (True, False):
            launch.LAZY, old = lazy, launch.LAZY

            def call(tau: torch.Tensor = tau) -> torch.Tensor:
                out = elastic_decode(q, k, v, None, tau)
                assert isinstance(out, torch.Tensor)
                return out

            _, found = elastic_decode(q, k, v, None, tau, return_statistics=True)
            read = float(found.survivors.sum()) / (cache.length * cache.heads) if lazy else 1.0
            row = {
                "case": "values", "pattern": "survivors' values" if lazy else "all values", "mechanism": "elastic",
                "density": share, "read": read, "kind": "none", "block": 64, **_facts(cache),
            }  # fmt: skip
            size = (k.numel() + read * v.numel()) * k.element_size()
            bench.time(row, call, size, gate(call, q, k, v, tau))
            launch.LAZY = old


def lengths(bench: Bench) -> None:
    """Contexts of 8,192 tokens to 2^20, 16 heads of 128."""
    for length in (8192, 32768, 131072, 524288, 1048576):
        cache = Cache(length, 16, 16, 128, torch.bfloat16, torch.device("cuda"))
        dense(bench, cache, ("FA2",), "length")
        for density in (0.38, 0.1):
            k = cache.plant(density, "scattered", 64)
            ours(bench, cache, k, make_block_bounds(k, "minmax", block=64), density, "scattered", "length")
        del cache, k


ALL_BOUNDS = ((None, 64), ("minmax", 64), ("int8", 16), ("int8", 32))


def trained(
    bench: Bench, path: Path, note: str = "", masses: tuple[float, ...] = (1.0, 0.99, 0.9, 0.5),
    kinds: tuple[tuple[str | None, int], ...] = ALL_BOUNDS,
) -> float:  # fmt: skip
    """Keys of a trained model, thresholds constant for each head that keep a share of the softmax mass on average.

    The file holds "q" (layers, heads, rows, D) and "k" (layers, groups, S, D), bfloat16; every row becomes COPIES
    sequences with keys of their own, so that the caches are many times the L2. Returns the sum of our times.
    """
    found = torch.load(path, weights_only=True)
    q, k = found["q"].cuda(), found["k"].cuda()
    heads, rows, dim = q.shape[1:]
    groups, length = k.shape[1:3]
    score = (q.float() @ k.float().repeat_interleave(heads // groups, 1).transpose(-1, -2)) * dim**-0.5
    mass = score.softmax(-1)
    q = q.transpose(1, 2).flatten(0, 1)[:, :, None].repeat(COPIES, 1, 1, 1)
    k = k[:, None].expand(-1, rows, -1, -1, -1).flatten(0, 1).repeat(COPIES, 1, 1, 1)
    v = torch.randn(k.shape, generator=torch.Generator("cuda").manual_seed(0), device="cuda").to(k.dtype)
    common = {
        "case": "tuning" if note else "trained", "batch": q.shape[0], "heads": heads, "groups": groups,
        "length": length, "dim": dim, "dtype": "bfloat16", "note": note,
    }  # fmt: skip
    data = k.numel() * k.element_size()

    def flash() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    if not note:
        bench.time({**common, "pattern": "all mass", "mechanism": "FA2", "density": 1.0}, flash, 2 * data, None)
    total = 0.0
    for kept in masses:
        order = score.flatten(2).sort(-1, descending=True)
        sums = mass.flatten(2).double().gather(2, order.indices).cumsum(-1) / rows
        at = (sums < kept).sum(-1, keepdim=True).clamp_max(order.values.shape[-1] - 1)
        tau = order.values.gather(2, at) if kept < 1 else torch.full_like(order.values[..., :1], -math.inf)
        tau = tau[:, None].expand(-1, rows, -1, -1).flatten(0, 1).repeat(COPIES, 1, 1)
        for kind, block in kinds:
            bounds = None if kind is None else make_block_bounds(k, kind, block=block)
            if kept == 1.0 and kind is not None:
                continue

            def call(bounds: BlockBounds | None = bounds, tau: torch.Tensor = tau) -> torch.Tensor:
                out = elastic_decode(q, k, v, bounds, tau)
                assert isinstance(out, torch.Tensor)
                return out

            _, met = elastic_decode(q, k, v, bounds, tau, return_statistics=True)
            survivors = float(met.survivors.sum()) / (q.shape[0] * heads * length)
            read = float(met.blocks_read.sum()) * block / (k.shape[0] * groups * length)
            row = {
                **common, "pattern": f"{kept:.0%} of the mass", "mechanism": "elastic", "density": survivors,
                "read": read, "kind": kind or "none", "block": block,
            }  # fmt: skip
            if bounds is not None:
                row["metadata"] = bounds.nbytes / (2 * data)
            total += bench.time(row, call, None, None if note else _agree(call(), q, k, v, tau))
    return total


def _agree(
    got: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tau: torch.Tensor
) -> tuple[float, float]:
    """As :func:`gate`, for a batch."""
    exact = elastic_decode(*(x.double() for x in (q, k, v)), None, tau, implementation="reference")
    eager = elastic_decode(q, k, v, None, tau, implementation="reference")
    assert isinstance(exact, torch.Tensor)
    assert isinstance(eager, torch.Tensor)
    size = exact.norm()
    low = float((eager.double() - exact).norm() / size)
    return float((got.double() - exact).norm() / size), 2 * (low + torch.finfo(q.dtype).eps)


def _use(chosen: launch.Options) -> None:
    launch.options = lambda *_: chosen


def _screen_with(chosen: launch.Screening, int8: bool) -> None:
    """Use ``chosen`` for int8 bounds, or for the others."""
    launch.screen_options = lambda *given: chosen if bool(given[-1]) == int8 else SCREEN(*given)


def tune(bench: Bench, cache: Cache) -> None:
    """Try launch options, one after another, and keep the fastest for what follows."""
    planted = {x: cache.plant(x, "scattered", 64) for x in (0.1, 0.38)}
    kept = {x: make_block_bounds(k, "minmax", block=64) for x, k in planted.items()}

    def total(note: str, densities: tuple[float, ...] = (0.1, 0.38)) -> float:
        # As shares of a pass over everything, so that no density outweighs the others.
        return sum(
            ours(bench, cache, planted[x], kept[x], x, "scattered", "tuning", False, note) / x for x in densities
        )

    found = {}
    for shape in (
        (64, 4, 3, 2, None), (64, 4, 2, 4, 128), (64, 4, 2, 3, 168), (64, 4, 3, 3, 168), (64, 4, 4, 2, None),
        (32, 4, 4, 4, 128), (64, 2, 2, 4, None),
    ):  # fmt: skip
        _use(launch.Options(16, *shape))
        found[shape] = total(f"attention {shape}")
    best = launch.Options(16, *min(found, key=found.__getitem__))
    _use(best)
    found = {}
    for shape in (
        (256, 64, 4, 3), (256, 64, 4, 2), (512, 64, 4, 3), (128, 64, 4, 3), (256, 32, 4, 4), (128, 32, 4, 3),
        (256, 64, 8, 3), (256, 128, 8, 2),
    ):  # fmt: skip
        _screen_with(launch.Screening(*shape), False)
        found[shape] = total(f"screen {shape}", (0.1,))
    screening = launch.Screening(*min(found, key=found.__getitem__))
    _screen_with(screening, False)
    for early in (False, True):
        launch.EARLY = early
        found[early] = total(f"early launch {early}", (0.1,))
    launch.EARLY = found[True] < found[False]
    print("chosen", best, screening, "early", launch.EARLY, flush=True)


def tune_trained(bench: Bench, path: Path) -> None:
    """The same for a trained model's keys, head dim 64."""
    found = {}
    for shape in (
        (64, 4, 3, 2, None), (64, 4, 3, 4, 128), (128, 4, 3, 2, None), (128, 8, 3, 2, 128), (64, 2, 3, 4, None)
    ):  # fmt: skip
        _use(launch.Options(16, *shape))
        found[shape] = trained(bench, path, f"attention {shape}", (0.9, 0.5), ((None, 64), ("int8", 16)))
    best = launch.Options(16, *min(found, key=found.__getitem__))
    _use(best)
    found = {}
    for shape in ((512, 8, 4, 3), (1024, 16, 4, 3), (512, 16, 4, 2), (512, 16, 8, 3), (512, 4, 4, 4)):
        _screen_with(launch.Screening(*shape), True)
        found[shape] = trained(bench, path, f"screen {shape}", (0.5,), (("int8", 16),))
    screening = launch.Screening(*min(found, key=found.__getitem__))
    _screen_with(screening, True)
    print("chosen", best, screening, flush=True)


def updates(bench: Bench, cache: Cache) -> None:
    """Bounds of one new token, and of a whole cache."""
    bounds = make_block_bounds(cache.k, "minmax", block=64)
    start = torch.full((1,), cache.length - 1, dtype=torch.int32, device=cache.k.device)
    row = {"case": "update", "mechanism": "update_block_bounds", "kind": "minmax", "block": 64, **_facts(cache)}
    one = {**row, "pattern": "one token"}
    bench.time(one, lambda: update_block_bounds(bounds, cache.k, start, 1), None, None)
    size = cache.k.numel() * cache.k.element_size()
    row["pattern"] = "all tokens"
    bench.time(row, lambda: update_block_bounds(bounds, cache.k, 0, cache.length), size, None)


def serving(bench: Bench) -> None:
    """TRA over unit keys, of which no bound screens any: 8 sequences, 32 query heads, 8 key heads, 32,768 keys."""
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn((8, h, t, 128), generator=g, device="cuda").to(torch.bfloat16)
        for h, t in ((32, 1), (8, 32768), (8, 32768))
    )
    k = torch.nn.functional.normalize(k.float(), dim=-1).to(k.dtype)
    wide = elastic_decode(q.double(), k.double(), v.double(), None, beta=1.0, weights="tra", implementation="reference")
    low = elastic_decode(q, k, v, None, beta=1.0, weights="tra", implementation="reference")
    assert isinstance(wide, torch.Tensor)
    assert isinstance(low, torch.Tensor)
    size = float(wide.norm())
    row = {
        "case": "serving", "pattern": "random unit keys", "density": 1.0, "block": 64, "batch": 8, "heads": 32,
        "groups": 8, "length": 32768, "dim": 128, "dtype": "bfloat16",
    }  # fmt: skip
    data = 2 * k.numel() * k.element_size()
    for kind in (None, "minmax", "cap"):
        bounds = None if kind is None else make_block_bounds(k, kind, block=64)

        def call(bounds: BlockBounds | None = bounds) -> torch.Tensor:
            out = elastic_decode(q, k, v, bounds, beta=1.0, weights="tra")
            assert isinstance(out, torch.Tensor)
            return out

        error = float((call().double() - wide).norm()) / size
        allowed = 2 * (float((low.double() - wide).norm()) / size + torch.finfo(q.dtype).eps)
        read = data + (bounds.nbytes if bounds is not None else 0)
        bench.time({**row, "mechanism": "elastic TRA", "kind": kind or "none"}, call, read, (error, allowed))
    unit = torch.nn.functional.normalize(q.float(), dim=-1).to(q.dtype)
    peer = {**row, "mechanism": "threshold_attention, unit keys", "kind": "none"}
    bench.time(peer, lambda: threshold_attention(unit, k, v, beta=1.0, query_offset=32767, normalize=False), data, None)


def kernels(cache: Cache, density: float) -> None:
    """Print the time of each kernel of a call."""
    k = cache.plant(density, "scattered", 64)
    bounds = make_block_bounds(k, "minmax", block=64)
    tau = torch.full((1, cache.heads, 1), TAU, device=k.device)
    elastic_decode(cache.q, k, cache.v, bounds, tau)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(10):
            elastic_decode(cache.q, k, cache.v, bounds, tau)
        torch.cuda.synchronize()
    for event in profile.key_averages():
        print(f"{event.key[:60]:60} {event.device_time_total / 10:9.2f} us a call, {event.count / 10:g} launches")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="CSV to write")
    parser.add_argument("--length", type=int, default=524288)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--trained", type=Path, help="queries and keys of a model (decode_bounds.py --save)")
    parser.add_argument("--tune", action="store_true", help="try launch options first and keep the fastest")
    options = parser.parse_args()
    device = torch.device("cuda")
    bench = Bench(options.out)
    cache = Cache(options.length, options.heads, options.groups, options.dim, torch.bfloat16, device)
    if options.tune:
        tune(bench, cache)
    dense(bench, cache)
    ours(bench, cache, cache.k, None, 1.0, "random", "density")
    for pattern in ("scattered", "clustered", "uneven"):
        for density in (1.0, 0.38, 0.1, 0.01):
            if (pattern == "uneven") and density > 0.5:
                continue
            k = cache.plant(density, pattern, 64)
            ours(bench, cache, k, make_block_bounds(k, "minmax", block=64), density, pattern, "density")
            del k
    for density in (1.0, 0.38, 0.1):
        k = cache.plant(density, "scattered", 64, True)
        ours(bench, cache, k, make_block_bounds(k, "minmax", block=64), density, "one key a block", "density")
        del k
    values(bench, cache)
    for kind, block in (("norm", 64), ("ball", 64), ("cap", 64), ("minmax", 128), ("ball", 128), ("int8", 16)):
        k = cache.plant(0.1, "scattered", block)
        ours(bench, cache, k, make_block_bounds(k, kind, block=block), 0.1, "scattered", "kind")
        del k
    updates(bench, cache)
    serving(bench)
    lengths(bench)
    for density in (0.1, 1.0):
        print("density", density)
        kernels(cache, density)
    if options.trained is not None:
        if options.tune:
            tune_trained(bench, options.trained)
        trained(bench, options.trained)


if __name__ == "__main__":
    main()
