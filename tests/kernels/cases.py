"""Inputs, runs and the error budget that the attention tests share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from theory_kernels import differential_threshold_attention, threshold_attention


@dataclass(frozen=True)
class Case:
    """One call. ``options`` go to the public function; lists in it become integer tensors."""

    batch: int = 1
    heads: int = 2
    groups: int = 2
    t: int = 40
    s: int = 40
    d: int = 16
    e: int = 16
    dtype: torch.dtype = torch.float32
    views: int = 1
    beta: float = 0.3
    lam: float = 0.4
    layout: str = "plain"
    seed: int = 0
    options: dict = field(default_factory=dict)

    def __str__(self) -> str:
        extra = ",".join(f"{k}={v}" for k, v in self.options.items())
        kind = "TDA" if self.views == 2 else "TRA"
        return (
            f"{kind}-{self.batch}x{self.heads}:{self.groups}-T{self.t}-S{self.s}-D{self.d}-E{self.e}-"
            f"{str(self.dtype).removeprefix('torch.')}-b{self.beta}-{self.layout}-{extra}"
        )


def _arrange(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values behind other strides."""
    if layout == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "fused":
        b, h, t, d = x.shape
        wide = torch.full((b, t, 3, h, d), float("nan"), dtype=x.dtype, device=x.device)
        wide[:, :, 1] = x.transpose(1, 2)
        return wide[:, :, 1].transpose(1, 2)
    if layout == "columns":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    return x


def inputs(case: Case, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Operands q, k[, q2, k2], v in the case's dtype, and the gradient of the output."""
    g = torch.Generator().manual_seed(case.seed)

    def draw(*shape: int) -> torch.Tensor:
        # Drawn in the low precision: the reference sees exactly the same numbers.
        return torch.randn(shape, generator=g).to(case.dtype).to(device)

    q_shape, k_shape = (case.batch, case.heads, case.t, case.d), (case.batch, case.groups, case.s, case.d)
    operands = [draw(*shape) for _ in range(case.views) for shape in (q_shape, k_shape)]
    operands.append(draw(case.batch, case.groups, case.s, case.e))
    return operands, draw(case.batch, case.heads, case.t, case.e)


def run(
    case: Case, operands: list[torch.Tensor], grad: torch.Tensor, implementation: str, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Output and every gradient of one implementation with operands of ``dtype``."""
    device = grad.device
    leaves = [_arrange(x.to(dtype), case.layout).detach().requires_grad_() for x in operands]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    beta = torch.full((case.heads,), case.beta, dtype=wide, device=device, requires_grad=True)
    lam = torch.full((case.heads,), case.lam, dtype=wide, device=device, requires_grad=True)
    options = {
        k: torch.tensor(v, dtype=torch.int32, device=device) if isinstance(v, list) else v
        for k, v in case.options.items()
    }
    names = ["q", "k", "v", "beta"] if case.views == 1 else ["q1", "k1", "q2", "k2", "v", "beta", "lam"]
    if case.views == 1:
        out = threshold_attention(*leaves, beta=beta, implementation=implementation, **options)
        wanted = [*leaves, beta]
    else:
        out = differential_threshold_attention(*leaves, beta=beta, lam=lam, implementation=implementation, **options)
        wanted = [*leaves, beta, lam]
    grads = torch.autograd.grad(out, wanted, grad.to(dtype), allow_unused=True)
    zeros = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)]
    return {"out": out.detach(), **dict(zip(names, zeros, strict=True))}


def _raw_gradient(case: Case, operands: list[torch.Tensor], grad: torch.Tensor) -> torch.Tensor:
    """|d loss / d raw output| before anything cancels: |do|, or r (|do| + |o| mean |do o|) behind the output norm."""
    eps = case.options.get("rms_eps")
    if eps is None:
        return grad.double().abs()
    plain = replace(case, options={k: v for k, v in case.options.items() if k != "rms_eps"})
    raw = run(plain, [x.double() for x in operands], grad.double(), "reference", torch.float64)["out"]
    r = (raw.square().mean(-1, keepdim=True) + eps).rsqrt()
    o, do = (raw * r).abs(), grad.double().abs()
    return r * (do + o * (do * o).mean(-1, keepdim=True))


def magnitudes(case: Case, operands: list[torch.Tensor], grad: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sums of absolute contributions to the gradients of q, k, beta and lambda.

    These gradients are sums with cancellation (over keys and rows, in <do, v>, and in the radial part that
    normalization takes out), so their rounding scales with such a sum, not with the result. With |v|, |do|
    and a negative lambda every dS_ij has the same sign, and without normalization nothing is projected out.
    """
    positive = [*(x.double() for x in operands[:-1]), operands[-1].double().abs()]
    raw = _raw_gradient(case, operands, grad)
    options = {k: v for k, v in case.options.items() if k != "rms_eps"}
    absolute = replace(case, lam=-case.lam, options=options)
    found = run(absolute, positive, raw, "reference", torch.float64)
    out = {name: found[name].abs() for name in ("beta", "lam") if name in found}
    if case.options.get("normalize", True):
        norms = [x.norm(dim=-1, keepdim=True) for x in positive[:-1]]
        unit = [x / n for x, n in zip(positive, norms, strict=False)]
        absolute = replace(absolute, options={**options, "normalize": False})
        found = run(absolute, [*unit, positive[-1]], raw, "reference", torch.float64)
        names = ("q", "k") if case.views == 1 else ("q1", "k1", "q2", "k2")
        out |= {name: found[name] / n for name, n in zip(names, norms, strict=True)}
    return out


def unit_roundoff(case: Case, implementation: str) -> float:
    """Rounding band of a result relative to its size.

    The dtype's own, except for float32 on tensor cores: three tf32 products leave out low times low, 2^-21 of
    a product, and a real power is exp2(p log2 x) with both to about 2^-22, p times over.
    """
    eps = torch.finfo(case.dtype).eps
    if implementation == "triton" and case.dtype == torch.float32:
        power = case.options.get("power", 2.0)
        eps = 2.0**-21 * (1.0 if power in (1.0, 2.0) else 1.0 + power)
    return eps


def assert_within_budget(case: Case, device: torch.device, implementation: str) -> None:
    """Error against float64 <= 2 (error of the eager reference in the low precision + rounding band)."""
    operands, grad = inputs(case, device)
    exact = run(case, operands, grad, "reference", torch.float64)
    eager = run(case, operands, grad, "reference", case.dtype)
    got = run(case, operands, grad, implementation, case.dtype)
    sums = magnitudes(case, operands, grad)
    eps = unit_roundoff(case, implementation)
    for name, want in exact.items():
        have = got[name].double()
        assert have.shape == want.shape, name
        assert bool(torch.isfinite(have).all()), f"{name} has elements that are not finite"
        if name in ("beta", "lam"):
            allowed = 2 * ((eager[name].double() - want).abs() + eps * sums[name])
            assert bool(((have - want).abs() <= allowed).all()), (name, have, want, allowed)
            continue
        for norm in (torch.inf, 2.0):
            size = torch.linalg.vector_norm(want, norm)
            if name in sums:
                size = torch.maximum(size, torch.linalg.vector_norm(sums[name], norm))
            error = torch.linalg.vector_norm(have - want, norm)
            allowed = 2 * (torch.linalg.vector_norm(eager[name].double() - want, norm) + eps * size)
            assert float(error) <= float(allowed), f"{name}, norm {norm}: {float(error):.3e} > {float(allowed):.3e}"
