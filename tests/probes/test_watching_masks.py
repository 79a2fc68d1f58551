"""Masks of every kind, read back: a description gives exactly the visible pairs, or is not given."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from theory_lab.probes import AttentionCall, Visibility  # noqa: E402  # after the skip
from theory_lab.probes import visibility as masks  # noqa: E402
from theory_lab.probes.selfcheck import fault  # noqa: E402
from theory_lab.probes.visibility import Indescribable, read_mask  # noqa: E402


def read(mask, queries: int, keys: int, batch: int = 1, causal: bool = True, backend: str = "sdpa", window=None):
    q, k = torch.empty(batch, 4, queries, 2), torch.empty(batch, 2, keys, 2)
    return read_mask(mask, backend=backend, q=q, k=k, causal=causal, window=window)


@pytest.mark.parametrize("seed", range(4))
def test_random_descriptions_are_found_again(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    for _ in range(150):
        batch, queries, keys = pick(1, 3), pick(1, 9), pick(1, 12)
        causal = bool(pick(0, 1))
        starts = torch.randint(0, keys + 1, (batch,), generator=generator) * pick(0, 1)
        lengths = (
            torch.randint(0, keys + 1, (batch,), generator=generator) if pick(0, 1) else torch.tensor([keys] * batch)
        )
        given = Visibility(
            causal=causal,
            query_offset=pick(0, keys) if causal else 0,
            window=pick(1, keys) if causal and pick(0, 1) else None,
            key_starts=starts,
            lengths=lengths,
        )
        wanted = given.materialize(batch, queries, keys)
        # A row whose last key is its own position shows the offset; where padding cuts every row short, none does.
        own = (torch.arange(queries) + given.query_offset)[:, None] == torch.arange(keys)
        told = not causal or bool((wanted & own).any())
        additive = torch.where(wanted, 0.0, torch.finfo(torch.float16).min).half()
        for mask, backend in ((wanted, "sdpa"), (additive, "eager")):
            found = read(mask, queries, keys, batch, causal, backend)
            assert torch.equal(found.materialize(batch, queries, keys).expand_as(wanted), wanted), given
            assert found.mask is None or not told, given


@pytest.mark.parametrize("seed", range(4))
def test_any_mask_is_given_back(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(50):
        shape = [int(torch.randint(1, 6, (), generator=generator)) for _ in range(2)]
        for heads in (1, 4):
            mask = torch.rand(2, heads, *shape, generator=generator) < 0.7
            found = read(mask, *shape, batch=2, causal=seed % 2 == 0)
            assert torch.equal(found.materialize(2, *shape).expand_as(mask), mask)


def test_long_masks_are_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = Visibility(causal=True, window=40, key_starts=torch.tensor([0, 70])).materialize(2, 129, 129)
    monkeypatch.setattr(masks, "_BLOCK", 1000)
    found = read(wanted, 129, 129, 2)
    assert (found.causal, found.query_offset, found.window, found.mask) == (True, 0, 40, None)
    assert found.key_starts.tolist() == found.query_starts.tolist() == [0, 70]


@pytest.mark.parametrize(
    ("backend", "causal", "queries", "keys", "wanted"),
    [
        ("sdpa", True, 5, 5, Visibility(causal=True)),
        ("sdpa", True, 5, 9, Visibility(causal=True)),  # an empty static cache: the first query is the first key
        ("sdpa", True, 1, 9, Visibility(causal=True, query_offset=8)),
        ("sdpa", False, 5, 9, Visibility(causal=False)),
        ("eager", True, 5, 5, Visibility(causal=False)),  # eager functions know no causality but the mask's
        ("eager", True, 1, 9, Visibility(causal=True, query_offset=8)),
        ("flash_attention_2", True, 5, 9, Visibility(causal=True, query_offset=4, window=3)),
        ("flash_attention_2", False, 5, 9, Visibility(causal=False)),
    ],
)
def test_without_a_mask_the_backend_decides(backend, causal, queries, keys, wanted) -> None:
    assert read(None, queries, keys, causal=causal, backend=backend, window=3) == wanted


def test_padding_as_flash_attention_takes_it() -> None:
    left = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    found = read(left, 4, 4, 2, backend="flash_attention_2", window=2)
    assert found.key_starts.tolist() == found.query_starts.tolist() == [0, 2]
    assert (found.causal, found.window, found.lengths) == (True, 2, None)
    found = read(left.flip(1), 1, 4, 2, backend="flash_attention_2")
    assert found.lengths.tolist() == [4, 2]
    assert found.query_offset == 3
    with pytest.raises(Indescribable, match="inside the text"):
        read(torch.tensor([[1, 0, 1]]), 3, 3, backend="flash_attention_2")


def test_flex_attention_masks_are_read_through_their_function() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    def window(b, h, row, column):
        return (column <= row) & (column > row - 6)

    block = create_block_mask(window, B=1, H=None, Q_LEN=20, KV_LEN=20, device="cpu")
    assert read(block, 20, 20, backend="flex_attention") == Visibility(causal=True, window=6)


def test_a_bias_is_noticed() -> None:
    bias = torch.zeros(1, 1, 3, 3)
    bias[..., 2, 0] = -0.5
    with pytest.raises(Indescribable, match="bias"):
        read(bias, 3, 3, backend="eager")
    with pytest.raises(Indescribable, match="int64"):
        read(torch.ones(1, 1, 3, 3, dtype=torch.long), 3, 3)
    with pytest.raises(Indescribable, match="does not fit"):
        read(torch.ones(1, 1, 3, 2, dtype=torch.bool), 3, 3)


def test_a_mask_written_to_is_read_again() -> None:
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    assert read(mask, 4, 4).window is None
    mask.logical_and_(torch.ones(4, 4, dtype=torch.bool).triu(-1))
    assert read(mask, 4, 4).window == 2


def attention_call(**changes) -> tuple[AttentionCall, torch.Tensor]:
    """A call with grouped heads, a window and padding, and what PyTorch's attention gives for it."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, heads, 33, 6, generator=generator) for heads in (4, 2, 2))
    seen = Visibility(causal=True, window=9, key_starts=torch.tensor([0, 5]), query_starts=torch.tensor([0, 5]))
    output = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen.materialize(2, 33, 33), scale=0.3, enable_gqa=True
    )
    call = AttentionCall(
        layer=0, name="attention", module=torch.nn.Identity(), q=q, k=k, v=v, scale=0.3, softcap=None, sinks=None,
        visibility=seen,
    )  # fmt: skip
    return replace(call, **changes), output.transpose(1, 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"scale": 0.3001},
        {"softcap": 50.0},
        {"sinks": torch.full((4,), -8.0)},
        {"visibility": Visibility(causal=True, window=8, key_starts=torch.tensor([0, 5]))},
        {"visibility": Visibility(causal=True, window=9)},
        {"visibility": Visibility(causal=True, query_offset=1, window=9, key_starts=torch.tensor([0, 5]))},
    ],
    ids=["scale", "softcap", "sinks", "window", "padding", "offset"],
)
def test_a_wrong_description_does_not_explain_the_output(changes: dict) -> None:
    call, output = attention_call()
    assert fault(call, output) is None
    masked = replace(call.visibility, mask=call.visibility.materialize(2, 33, 33))
    assert fault(replace(call, visibility=masked), output) is None
    assert "not the softmax attention" in fault(replace(call, **changes), output)
    assert "not finite" in fault(call, output.masked_fill(output > 0, torch.nan))
