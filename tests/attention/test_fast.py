"""Fast forms against the mechanisms' references: outputs and every gradient, in float64 and float32."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from attention_inputs import NAMES, build, inputs
from torch import Tensor

from theory_lab.attention.fast import attend, has_fast
from theory_lab.errors import InputError

FAST = [name for name in NAMES if has_fast(build(name))]
every = pytest.mark.parametrize("name", NAMES)
fast = pytest.mark.parametrize("name", FAST)


def test_what_language_models_train_with_is_fast() -> None:
    wanted = {"softmax", "gated-softmax", "ssmax", "diff-softmax", "dex", "tra", "tda", "rela", "diff-rela",
              "entmax", "sparsemax", "asentmax-theta", "asentmax", "eta-logit", "eta-weight"}  # fmt: skip
    assert wanted <= set(FAST)


def gradients(name: str, call: Callable[..., Tensor], dtype: torch.dtype, **shape: int) -> dict[str, Tensor]:
    m = build(name)
    data = inputs(m.views, dtype=dtype, **shape).map(lambda _, t: t.clone().requires_grad_())
    tensors = {f: t for f, t in vars(data).items() if t is not None}
    out = call(m, **tensors)
    leaves = {**tensors, **dict(m.named_parameters())}
    g = torch.Generator().manual_seed(5)
    grad = torch.randn(out.shape, generator=g, dtype=torch.float64).to(dtype)
    found = torch.autograd.grad(out, list(leaves.values()), grad, allow_unused=True)
    return {"out": out.detach()} | {
        f: torch.zeros_like(leaf) if d is None else d for (f, leaf), d in zip(leaves.items(), found, strict=True)
    }


SHAPES = [{}, {"queries": 1}, {"queries": 4}, {"queries": 33, "keys": 33}]


@every
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_same_numbers_in_float64(name: str, shape: dict[str, int]) -> None:
    """Everything is one computation in another order: agreement to float64's rounding, gradients included."""
    want = gradients(name, lambda m, **t: m(**t).output, torch.float64, **shape)
    got = gradients(name, lambda m, **t: attend(m, **t), torch.float64, **shape)
    for field, value in want.items():
        scale = 1.0 + float(value.abs().max())
        assert float((got[field] - value).abs().max()) <= 1e-11 * scale, field


@fast
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_within_the_budget_of_a_low_precision_run(name: str, dtype: torch.dtype) -> None:
    """Error against float64 <= 2 (error of the reference in the same precision + rounding of the magnitudes)."""
    m = build(name)
    data = inputs(m.views, queries=24, keys=24, dtype=dtype)
    wide = data.map(lambda _, t: t.double())
    tensors = {f: t for f, t in vars(data).items() if t is not None}
    with torch.no_grad():
        exact = wide.call(m).output
        eager = data.call(m).output.double()
        got = attend(m, **tensors)
    assert got.dtype == dtype
    # A score rounded to eps |s| moves an exponential by as much; the products and the sum round once each.
    eps = torch.finfo(dtype).eps * (2.0 + float(m.scores(wide.q, wide.k.repeat_interleave(2, 1)).abs().max()))
    for norm in (torch.inf, 2.0):
        error = torch.linalg.vector_norm(got.double() - exact, norm)
        band = torch.linalg.vector_norm(eager - exact, norm) + eps * torch.linalg.vector_norm(exact, norm)
        assert float(error) <= 2.0 * float(band), norm


MASKS = {
    "none": torch.ones(2, 9, dtype=torch.bool),
    "right": torch.arange(9)[None] < torch.tensor([[9], [5]]),
    "left": torch.arange(9)[None] >= torch.tensor([[0], [4]]),
    "both": (torch.arange(9)[None] >= 2) & (torch.arange(9)[None] < torch.tensor([[8], [5]])),
    "empty": torch.arange(9)[None] < torch.tensor([[9], [0]]),
    "holes": torch.tensor([[1, 0, 1, 1, 0, 1, 1, 1, 0], [1] * 9], dtype=torch.bool),
}


@every
@pytest.mark.parametrize("which", MASKS)
@pytest.mark.parametrize("causal", [True, False])
def test_padding(name: str, which: str, causal: bool) -> None:
    m = build(name)
    if m.causal_only and not causal:
        pytest.skip("defined by the decoding order")
    data = inputs(m.views)
    pad = ~MASKS[which][:, None, :, None]
    spoiled = data.map(lambda f, t: t.masked_fill(pad, torch.nan) if f in ("k", "v", "k2") else t)
    tensors = {f: t for f, t in vars(spoiled).items() if t is not None}
    want = data.call(m, key_mask=MASKS[which], causal=causal).output
    got = attend(m, **tensors, key_mask=MASKS[which], causal=causal)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


@every
def test_packed_sequences_do_not_meet(name: str) -> None:
    m = build(name)
    data = inputs(m.views, batch=1, queries=20, keys=20)
    tensors = {f: t for f, t in vars(data).items() if t is not None}
    got = attend(m, **tensors, cu_seqlens=torch.tensor([0, 7, 7, 8, 20]))
    for first, stop in ((0, 7), (7, 8), (8, 20)):
        cut = data.map(lambda f, t, a=first, b=stop: t[:, a:b] if f == "x" else t[:, :, a:b])
        torch.testing.assert_close(got[:, :, first:stop], cut.call(m).output, rtol=1e-11, atol=1e-12)


@every
def test_masks_and_counts_from_outside(name: str) -> None:
    m = build(name)
    data = inputs(m.views)
    tensors = {f: t for f, t in vars(data).items() if t is not None}
    mask = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(0)) < 0.7
    for options in ({"mask": mask}, {"n": 30}):
        torch.testing.assert_close(
            attend(m, **tensors, **options), data.call(m, **options).output, rtol=1e-11, atol=1e-12
        )


@every
def test_rows_in_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import theory_lab.attention.fast as module

    monkeypatch.setattr(module, "_MOST_WEIGHTS", 4 * 9 * 2 * 2)
    m = build(name)
    data = inputs(m.views)
    tensors = {f: t for f, t in vars(data).items() if t is not None}
    with torch.no_grad():
        got = attend(m, **tensors, implementation="reference")
    torch.testing.assert_close(got, data.call(m).output, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("alpha", [1.0, 2.5])
def test_an_alpha_outside_the_kernels_goes_to_the_reference(alpha: float) -> None:
    from theory_lab.attention import get

    data = inputs(1)
    for name in ("entmax", "asentmax-theta"):
        m = get(name, alpha=alpha)
        assert torch.equal(attend(m, data.q, data.k, data.v), m(data.q, data.k, data.v).output)
    with pytest.raises(InputError):
        attend(m, data.q, data.k, data.v, implementation="kernel")
    with torch.no_grad():
        m.alpha_.fill_(1.5)
    assert attend(m, data.q, data.k, data.v, implementation="kernel").shape == (2, 4, 9, 5)


@pytest.mark.parametrize("frozen", [False, True])
def test_an_alpha_learned_beside_theta_reaches_the_kernel(frozen: bool) -> None:
    """What is stored is its logit, which is 0 for 1.5: the kernel's range is that of the value."""
    from theory_lab.attention import get

    data = inputs(1)
    m = get("asentmax-theta", theta=0.8, alpha=[1.2, 1.4, 1.5, 1.9], learn_alpha=True).requires_grad_(not frozen)
    got = attend(m, data.q, data.k, data.v, implementation="kernel")
    torch.testing.assert_close(got, m(data.q, data.k, data.v).output, rtol=1e-9, atol=1e-10)
    with pytest.raises(InputError, match=r"alpha: 2\.0"):
        get("asentmax-theta", alpha=2.0, learn_alpha=True)


@pytest.mark.parametrize(
    ("alpha", "learnable", "number"),
    [(1.5, False, 1.5), (2.0, False, 2.0), ([1.5] * 4, False, 1.5), (1.3, False, 1.3),
     ([1.5, 1.5, 1.5, 2.0], False, None), (1.5, True, None)],
    ids=str,
)  # fmt: skip
def test_a_fixed_alpha_reaches_the_kernel_as_a_number(
    alpha: object, learnable: bool, number: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the values of a tensor are not read, so only a number gets the closed steps of 1.5 and 2."""
    from theory_lab.attention import get

    module = importlib.import_module("theory_kernels.entmax_attention")
    given: list[object] = []
    original = module.entmax_attention

    def watched(*operands: Tensor, **options: object) -> Tensor:
        given.append(options["alpha"])
        return original(*operands, **options)

    monkeypatch.setattr(module, "entmax_attention", watched)
    data, m = inputs(1), get("entmax", alpha=alpha, learnable=learnable)
    want = m(data.q, data.k, data.v).output
    for _ in range(2):
        torch.testing.assert_close(attend(m, data.q, data.k, data.v), want, rtol=1e-11, atol=1e-12)
    if number is None:
        assert all(isinstance(x, Tensor) for x in given)
        return
    assert given == [number] * 2
    with torch.no_grad():
        m.alpha_.fill_(1.7)
    attend(m, data.q, data.k, data.v)
    assert given[-1] == 1.7
    with torch.inference_mode():
        kept = get("entmax", alpha=alpha, learnable=learnable)
    attend(kept, data.q, data.k, data.v)
    assert given[-1] == number


@pytest.mark.parametrize("reading", ["eta-logit", "eta-weight"])
@pytest.mark.parametrize("prune", ["drop", "renormalize", "exact"])
@pytest.mark.parametrize("tau", [0.3, [0.1, 0.2, 0.3, 0.4]])
def test_elastic_pruning_with_constant_thresholds(reading: str, prune: str, tau: object) -> None:
    from theory_lab.attention import get

    data = inputs(1)
    m = get(reading, tau=tau, prune=prune)
    got = attend(m, data.q, data.k, data.v, implementation="kernel")
    torch.testing.assert_close(got, m(data.q, data.k, data.v).output, rtol=1e-11, atol=1e-12)


def test_one_graph_for_the_compiler() -> None:
    data, m = inputs(1, dtype=torch.float32), build("eta-logit")
    compiled = torch.compile(lambda q, k, v: attend(m, q, k, v), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(data.q, data.k, data.v), attend(m, data.q, data.k, data.v))


def test_a_compiled_call_has_the_closed_form_of_a_fixed_alpha() -> None:
    """Also of one that was loaded; what is learned stays a tensor of the graph."""
    from theory_lab.attention import get

    data, modes = inputs(1, dtype=torch.float32), []

    def backend(graph: torch.fx.GraphModule, operands: object) -> object:
        modes.extend(n.args[12] for n in graph.graph.nodes if "entmax_attention_forward" in str(n.target))
        return graph.forward

    def check(m: torch.nn.Module, mode: int) -> None:
        torch._dynamo.reset()
        got = torch.compile(lambda q, k, v: attend(m, q, k, v), backend=backend, fullgraph=True)(data.q, data.k, data.v)
        assert modes.pop() == mode
        assert torch.equal(got, attend(m, data.q, data.k, data.v))

    fixed = get("entmax", alpha=1.5)
    check(fixed, 1)
    fixed.load_state_dict({"alpha_": torch.tensor(2.0, dtype=torch.float64)})
    check(fixed, 2)
    check(get("asentmax-theta", alpha=2.0), 2)
    check(get("entmax", alpha=1.5, learnable=True), 0)


def test_method_and_subclass() -> None:
    m = build("tra")
    data = inputs(1)
    assert torch.equal(m.attend(data.q, data.k, data.v), attend(m, data.q, data.k, data.v))

    class Other(type(m)):
        def row_weights(self, scores, scope):
            return super().row_weights(scores, scope) * 0.0

    other = Other()
    assert not has_fast(other)
    assert not attend(other, data.q, data.k, data.v).any()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"implementation": "fast"}, "implementation"),
        ({"implementation": "kernel", "n": 3}, "implementation"),
        ({"cu_seqlens": torch.tensor([0, 9])}, "q"),
        ({"max_seqlen": 3}, "cu_seqlens"),
        ({"key_mask": torch.ones(2, 8, dtype=torch.bool)}, "key_mask"),
        ({"q2": torch.ones(2, 4, 9, 6, dtype=torch.float64)}, "q2"),
    ],
    ids=str,
)
def test_bad_input(change: dict, field: str) -> None:
    data = inputs(1)
    with pytest.raises(InputError) as caught:
        attend(build("tra"), data.q, data.k, data.v, **change)
    assert caught.value.field == field


def test_a_name_is_no_mechanism() -> None:
    q = torch.ones(1, 1, 2, 4)
    with pytest.raises(InputError, match="mechanism: 'softmax'"):
        attend("softmax", q, q, q)  # type: ignore[arg-type]  # what is refused
