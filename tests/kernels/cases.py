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
        out = differential_threshold_attention(
            *leaves, beta=beta, lam=lam, implementation=implementation, **options
        )
        wanted = [*leaves, beta, lam]
    grads = torch.autograd.grad(out, wanted, grad.to(dtype), allow_unused=True)
    zeros = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)]
    return {"out": out.detach(), **dict(zip(names, zeros, strict=True))}


def magnitudes(case: Case, operands: list[torch.Tensor], grad: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sum of the absolute contributions to the gradients of beta and lambda.

    They are sums over all rows and keys with cancellation, so their rounding scales with this sum, not
    with the result. With |v|, |do| and a negative lambda every contribution has the same sign.
    """
    positive = [*operands[:-1], operands[-1].abs()]
    plain = {k: v for k, v in case.options.items() if k != "rms_eps"}
    absolute = run(
        replace(case, lam=-case.lam, options=plain), [x.double() for x in positive], grad.abs().double(), "reference",
        torch.float64,
    )  # fmt: skip
    return {name: absolute[name].abs() for name in ("beta", "lam") if name in absolute}


def unprojected(case: Case, operands: list[torch.Tensor], grad: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of queries and keys before anything cancels.

    (g - y <y, g>) / |x| rounds like g / |x|, and g = sum_j dS_ij k_j like the sum with dS_ij built from
    |do| and |v|, since <do_i, v_j> cancels too.
    """
    if not case.options.get("normalize", True):
        return {}
    norms = [x.double().norm(dim=-1, keepdim=True) for x in operands[:-1]]
    unit = [x.double() / n for x, n in zip(operands, norms, strict=False)]
    raw = run(
        replace(case, lam=-case.lam, options={**case.options, "normalize": False, "rms_eps": None}),
        [*unit, operands[-1].double().abs()], grad.double().abs(), "reference", torch.float64,
    )  # fmt: skip
    names = ("q", "k") if case.views == 1 else ("q1", "k1", "q2", "k2")
    return {name: raw[name] / n for name, n in zip(names, norms, strict=True)}


def assert_within_budget(case: Case, device: torch.device, implementation: str) -> None:
    """Error against float64 <= 2 (error of the eager reference in the low precision + rounding band)."""
    operands, grad = inputs(case, device)
    exact = run(case, operands, grad, "reference", torch.float64)
    eager = run(case, operands, grad, "reference", case.dtype)
    got = run(case, operands, grad, implementation, case.dtype)
    sums = {} if case.options.get("rms_eps") is not None else magnitudes(case, operands, grad)
    radial = unprojected(case, operands, grad)
    eps = torch.finfo(case.dtype).eps
    for name, want in exact.items():
        have = got[name].double()
        assert have.shape == want.shape, name
        assert bool(torch.isfinite(have).all()), f"{name} has elements that are not finite"
        if name in ("beta", "lam"):
            # One number a head: compare with the size of what was summed, where that is known.
            scale = sums[name] if name in sums else exact[name].abs().max().expand_as(want)
            band = eps * scale
            allowed = 2 * ((eager[name].double() - want).abs() + band)
            assert bool(((have - want).abs() <= allowed).all()), (name, have, want, allowed)
            continue
        for norm in (torch.inf, 2.0):
            size = torch.linalg.vector_norm(want, norm)
            if name in radial and case.options.get("rms_eps") is None:
                size = torch.maximum(size, torch.linalg.vector_norm(radial[name], norm))
            error = torch.linalg.vector_norm(have - want, norm)
            allowed = 2 * (torch.linalg.vector_norm(eager[name].double() - want, norm) + eps * size)
            assert float(error) <= float(allowed), f"{name}, norm {norm}: {float(error):.3e} > {float(allowed):.3e}"
