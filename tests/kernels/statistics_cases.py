"""Calls of attention_statistics, and the error budget that its tests share."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from unittest import mock

import torch
from theory_kernels import AttentionStatistics, attention_statistics
from theory_kernels.statistics import api, reference
from theory_kernels.statistics.moments import MomentTotals
from theory_kernels.statistics.request import Request, unit_rows

ALL = ("rows", "columns", "near_zero", "scores")
# Head-dependent parameters as lists, so that a case can be printed; two heads everywhere.
KINDS: dict[str, dict] = {
    "softmax": {"weights": "softmax"},
    "softmax-capped-sinks": {"weights": "softmax", "softcap": 2.0, "sinks": [0.5, -1.0], "scale": 0.5},
    "softmax-cosine": {"weights": "softmax", "normalize": True, "scale": 5.0},
    "eta-logit": {"weights": "eta", "eta_threshold": 0.2},
    "eta-weight": {"weights": "eta", "eta_threshold": [0.3, -0.2], "eta_reading": "weight", "softcap": 3.0},
    "entmax-1.5": {"weights": "entmax", "scale": 0.7},
    "entmax-2": {"weights": "entmax", "alpha": 2.0, "softcap": 4.0},
    "entmax-1.25": {"weights": "entmax", "alpha": 1.25},
    "tra": {"weights": "tra", "beta": 0.3},
    "tra-negative": {"weights": "tra", "beta": [-0.2, 0.5], "power": 1.0, "kappa": 2.0},
    "tda": {"weights": "tda", "beta": 0.3, "lam": [0.4, 0.6]},
    "tda-1.7": {"weights": "tda", "beta": 0.2, "power": 1.7, "normalize": False},
}


@dataclass(frozen=True)
class Case:
    """One call; lists in ``options`` become tensors, integers or floats as they are."""

    kind: str
    batch: int = 1
    groups: int = 2
    t: int = 33
    s: int = 33
    d: int = 12
    dtype: torch.dtype = torch.float32
    layout: str = "plain"
    seed: int = 0
    options: dict = field(default_factory=dict)

    def __str__(self) -> str:
        extra = ",".join(f"{k}={v}" for k, v in self.options.items() if k != "mask")
        name = str(self.dtype).removeprefix("torch.")
        return f"{self.kind}-{self.batch}x2:{self.groups}-T{self.t}-S{self.s}-D{self.d}-{name}-{self.layout}-{extra}"


def _arrange(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values behind other strides."""
    if layout == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "columns":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    return x


def _padded_with_nan(x: torch.Tensor, starts: list[int] | None, stops: list[int] | None, shift: list[int]) -> None:
    for b in range(x.shape[0]):
        if starts is not None:
            x[b, :, : max(0, starts[b] - shift[b])] = torch.nan
        if stops is not None:
            x[b, :, max(0, stops[b] - shift[b]) :] = torch.nan


def inputs(case: Case, device: torch.device) -> tuple[list[torch.Tensor], dict]:
    """q, k[, q2, k2] and the keyword arguments. What lies in padding is NaN."""
    g = torch.Generator().manual_seed(case.seed)
    given = {**KINDS[case.kind], **case.options}
    tensors = []
    offset = given.get("query_offset", 0)
    shift = offset if isinstance(offset, list) else [offset] * case.batch
    for _ in range(2 if given["weights"] == "tda" else 1):
        # Drawn in the low precision: the reference sees exactly the same numbers.
        q = torch.randn((case.batch, 2, case.t, case.d), generator=g).to(case.dtype)
        k = torch.randn((case.batch, case.groups, case.s, case.d), generator=g).to(case.dtype)
        # A row and a key of zeros, where they lie in the sequence.
        q[:, :, case.t // 2] = 0.0
        k[:, :, case.s // 3] = 0.0
        _padded_with_nan(k, given.get("key_starts"), given.get("lengths"), [0] * case.batch)
        _padded_with_nan(q, given.get("key_starts"), given.get("lengths"), shift)
        tensors += [_arrange(x.to(device), case.layout) for x in (q, k)]
    options = {n: torch.tensor(v, device=device) if isinstance(v, list) else v for n, v in given.items()}
    if "mask" in options:
        options["mask"] = options["mask"].to(device)
    return tensors, options


def run(tensors: list[torch.Tensor], options: dict, implementation: str, **more) -> AttentionStatistics:
    probes = {"levels": (0.1, 0.4), "exponents": (1.0, -0.5), "need": ALL}
    return attention_statistics(*tensors, **{**probes, **options, **more}, implementation=implementation)


def request_of(tensors: list[torch.Tensor], options: dict) -> tuple[list, Request]:
    """The views and the checked request that an implementation is given."""
    with mock.patch.object(api, "reference_statistics", lambda views, request: (views, request)):
        return run(tensors, options, "reference")  # type: ignore[return-value]


class Budget:
    """What a run in low precision may differ by: 2 (error of an eager float32 run + rounding band).

    The band of a float is eps times its size and its condition: a logit or score with |q| |k| = a carries an error
    of eps a, which a softmax weight takes as its relative error and a weight x^p as p / x times it. The band of a
    count is the number of entries nearer to its bound than that.
    """

    def __init__(self, case: Case, tensors: list[torch.Tensor], options: dict, implementation: str):
        views, request = request_of(tensors, options)
        self.map = map_ = reference.maps(views, request, torch.float64)
        self.exact = reference.summarize(map_, request)
        self.pilots = MomentTotals(views, request, 1.0, request.normalize).shift
        low = views
        eager_request = request
        if request.normalize and implementation == "triton" and case.dtype in (torch.float16, torch.bfloat16):
            # The kernels multiply unit rows in the dtype of the operands.
            low = [tuple(unit_rows(x.float()).to(case.dtype) for x in view) for view in views]
            eager_request = _without_normalization(request)
        eager = reference.maps(low, eager_request, torch.float32)
        self.eager = reference.summarize(eager, eager_request)
        self.request = request
        # Three tf32 products leave out low times low, 2^-21 of a product; powers are exp2(p log2 x).
        self.eps = 2.0**-21 if implementation == "triton" else 2.0**-23
        seen = map_.seen
        sizes = [_sizes(q, k, request, seen) for q, k in views]
        self.size = max(sizes)
        slips = [
            (2 * (_largest(torch.where(seen, a.double() - b, 0.0)) + self.eps * size))
            for a, b, size in zip(eager.scores, map_.scores, sizes, strict=True)
        ]
        self.slip = max(slips)
        scale = 1.0 if request.thresholded else request.scale
        self.power = request.power if request.thresholded else 1.0 / (request.alpha - 1.0)
        condition = scale * self.size
        if request.weights == "eta":
            condition *= 1.0 + request.eta_sharpness * max(1.0, condition)
        if map_.excess:
            step = 1.0 if request.thresholded else scale * (request.alpha - 1.0)
            self.distance = step * self.slip * (1.0 if request.thresholded else 2.0)
            top = max([_largest(torch.where(seen, x.clamp_min(0.0), 0.0)) for x in map_.excess])
            condition = self.power * step * self.size / top if top else 0.0
        self.band = self.eps * (1.0 + condition)
        self.relative = 2 * self.band + 2 * scale * self.slip

    def tolerance(self, w: torch.Tensor) -> torch.Tensor:
        """How much a weight may be off."""
        if not self.map.excess:
            return self.relative * w
        power = self.power
        factor = 1.0 + (float(self.request.lam.abs().max()) if self.request.views == 2 else 0.0)
        base = torch.stack([x.clamp_min(0.0) for x in self.map.excess]).amax(0) + self.distance
        return factor * power * base.pow(power - 1.0) * self.distance + 2 * self.eps * w

    def check(self, got: AttentionStatistics) -> None:
        exact, eager, map_ = self.exact, self.eager, self.map
        assert torch.equal(got.visible, exact.visible)
        assert torch.equal(got.column_rows, exact.column_rows)
        for name in ("mass", "entropy", "maximum", "column_mass"):
            self.floats(name, getattr(got, name), getattr(exact, name), getattr(eager, name))
        near = [map_.seen & (x.abs() <= self.distance) for x in map_.excess]
        doubtful = map_.seen & (map_.weights <= self.tolerance(map_.weights)) if map_.excess else None
        none = torch.zeros_like(exact.support)
        self.counts("support", got.support, exact.support, none if doubtful is None else doubtful.sum(-1))
        self.near_zero("near_zero", got.near_zero, exact.near_zero, map_.weights)
        if exact.survivors is not None:
            for view in range(len(near)):
                self.counts(f"survivors {view}", got.survivors[view], exact.survivors[view], near[view].sum(-1))
        assert (got.consensus is None) == (exact.consensus is None)
        if exact.consensus is not None:
            self.counts("consensus", got.consensus, exact.consensus, (near[0] | near[1]).sum(-1))
        assert len(got.views) == len(exact.views)
        for i, (have, want, low) in enumerate(zip(got.views, exact.views, eager.views, strict=True)):
            for name in ("mass", "maximum", "column_mass"):
                self.floats(f"view {i} {name}", getattr(have, name), getattr(want, name), getattr(low, name))
            self.counts(f"view {i} support", have.support, want.support, near[i].sum(-1))
            self.near_zero(f"view {i} near_zero", have.near_zero, want.near_zero, map_.parts[i])
        self.scores(got)

    def floats(self, name: str, have: torch.Tensor, want: torch.Tensor, eager: torch.Tensor, size: float = 0.0) -> None:
        assert have.dtype == torch.float64, name
        assert have.shape == want.shape, name
        assert bool(torch.isfinite(have).all()), f"{name} has elements that are not finite"
        for norm in (torch.inf, 2.0):
            error, slip = (float(torch.linalg.vector_norm(x - want, norm)) for x in (have, eager))
            # An entropy near 0 is a difference of numbers near 1.
            least = float(torch.linalg.vector_norm(torch.ones_like(want), norm)) if name == "entropy" else 0.0
            allowed = 2 * (slip + self.band * max(float(torch.linalg.vector_norm(want, norm)), least, size))
            assert error <= allowed, f"{name}, norm {norm}: {error:.3e} > {allowed:.3e}"

    def counts(self, name: str, have: torch.Tensor, want: torch.Tensor, doubtful: torch.Tensor) -> None:
        assert have.dtype == torch.int64, name
        assert have.shape == want.shape, name
        assert bool(((have - want).abs() <= doubtful).all()), f"{name}: {have} is not {want}"

    def near_zero(self, name: str, have: torch.Tensor, want: torch.Tensor, w: torch.Tensor) -> None:
        for index, bound in enumerate(self.request.near_zero):
            doubtful = self.map.seen & ((w - bound).abs() <= self.tolerance(w))
            self.counts(f"{name} {bound}", have[..., index], want[..., index], doubtful.sum((-2, -1)))

    def scores(self, got: AttentionStatistics) -> None:
        """Errors of the moments follow from the slip of a score: eps |q| |k|."""
        assert len(got.scores) == len(self.exact.scores)
        for i, (have, want) in enumerate(zip(got.scores, self.exact.scores, strict=True)):
            assert torch.equal(have.count, want.count)
            some = want.count > 0
            for name in ("mean", "variance", "minimum", "maximum"):
                assert torch.equal(getattr(have, name).isnan(), ~some), name
            spread = want.variance.sqrt()[some]
            # The squares are summed about a pilot mean, and its distance from the mean is taken out at the end.
            lag = (want.mean - self.pilots[i])[some]
            for name, allowed in (
                ("mean", self.slip + 0.0 * spread),
                ("minimum", self.slip + 0.0 * spread),
                ("maximum", self.slip + 0.0 * spread),
                (
                    "variance",
                    2 * (spread + lag.abs()) * self.slip
                    + self.slip**2
                    + 4 * self.eps * (spread.square() + lag.square()),
                ),
            ):
                error = (getattr(have, name)[some] - getattr(want, name)[some]).abs()
                assert bool((error <= allowed).all()), (name, error, allowed)
            for j, t in enumerate(self.request.exponents):
                error = (have.log_mgf[..., j][some] - want.log_mgf[..., j][some]).abs()
                allowed = abs(t) * self.slip + 4 * self.eps * (1.0 + abs(t) * self.size)
                assert bool((error <= allowed).all()), ("log_mgf", t, error, allowed)
            for j, level in enumerate(self.request.levels):
                close = self.map.seen & ((self.map.scores[i] - level).abs() <= self.slip + self.eps * level)
                self.counts(f"level {level}", have.exceedances[..., j], want.exceedances[..., j], close.sum((-2, -1)))
        assert (got.covariance is None) == (self.exact.covariance is None)
        if got.covariance is not None and self.exact.covariance is not None:
            some = self.exact.scores[0].count > 0
            far = [x.variance.sqrt() + (x.mean - p).abs() for x, p in zip(self.exact.scores, self.pilots, strict=True)]
            spread = torch.maximum(*far)[some]
            error = (got.covariance - self.exact.covariance)[some].abs()
            assert bool((error <= 2 * spread * self.slip + self.slip**2 + 4 * self.eps * spread.square()).all()), error


def _without_normalization(request: Request) -> Request:
    return Request(**{**{f.name: getattr(request, f.name) for f in fields(request)}, "normalize": False})


def _largest(x: torch.Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _sizes(q: torch.Tensor, k: torch.Tensor, request: Request, seen: torch.Tensor) -> float:
    """Largest sum of absolute products of a visible pair."""
    a, b = q.double().abs(), k.double().abs()
    if request.normalize:
        a, b = unit_rows(a), unit_rows(b)
    s = a @ b.repeat_interleave(a.shape[1] // b.shape[1], 1).transpose(-1, -2)
    return _largest(torch.where(seen, s, 0.0))
