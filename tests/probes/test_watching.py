"""Every architecture: the watched model computes bitwise what it computes unwatched, and the calls explain its maps."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
pytest.importorskip("transformers", reason="needs transformers")

from call_weights import assert_explains, seen_keys, valid_rows  # noqa: E402  # after the skips
from tiny_models import CONFIGS, build, texts  # noqa: E402

from theory_lab.probes import AttentionCall, watch  # noqa: E402

PADDINGS = ("none", "left", "right")
#: What the layers of an architecture see: their windows (an encoder's reach to both sides); None for all of the text.
WINDOWS = {
    "mistral": [5, 5],
    "gemma2": [5, None],
    "gemma3": [5, 5, 5, 5, 5, None],
    "phi3": [5, 5],
    "gpt-oss": [5, None],
    "modernbert": [None, 3, 3],
}


def run(model, inputs, **more) -> tuple[object, object, list[AttentionCall], object]:
    """Outputs unwatched and watched, the calls, and the watch."""
    calls: list[AttentionCall] = []
    with torch.no_grad():
        plain = model(**inputs, **more)
        with watch(model, calls.append) as seen:
            watched = model(**inputs, **more)
    return plain, watched, calls, seen


def same_bits(a, b) -> bool:
    """Equal bit for bit; NaN counts as equal to NaN (rows of padding may hold it)."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("name", CONFIGS)
def test_calls_explain_the_eager_maps(name: str) -> None:
    model = build(name)
    for padding in PADDINGS:
        plain, watched, calls, seen = run(model, texts(padding=padding), output_attentions=True)
        assert same_bits(plain[0], watched[0])
        assert seen.unseen == {}
        assert [call.layer for call in calls] == list(range(len(watched.attentions)))
        for call, shown in zip(calls, watched.attentions, strict=True):
            assert call.mask is None  # a simple description suffices
            assert call.window == WINDOWS.get(name, [None] * 9)[call.layer]
            assert_explains(call, shown)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ("gemma2", "gpt-oss")])  # they have no sdpa
def test_sdpa_is_described_as_eager_is(name: str) -> None:
    eager, sdpa = build(name), build(name, "sdpa")
    for padding in PADDINGS:
        inputs = texts(padding=padding)
        plain, watched, calls, seen = run(sdpa, inputs)
        assert same_bits(plain[0], watched[0])
        assert seen.unseen == {}
        for call, other in zip(calls, run(eager, inputs)[2], strict=True):
            rows = valid_rows(other)
            assert torch.equal(valid_rows(call), rows)
            assert torch.equal(rows, inputs["attention_mask"].bool())
            assert torch.equal(seen_keys(call) & rows[:, None, :, None], seen_keys(other) & rows[:, None, :, None])
            assert (call.scale, call.softcap) == (other.scale, other.softcap)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_types(dtype, attention: str) -> None:
    model = build("qwen2", attention, dtype)
    more = {"output_attentions": True} if attention == "eager" else {}
    plain, watched, calls, seen = run(model, texts(padding="right"), **more)
    assert same_bits(plain[0], watched[0])
    assert seen.unseen == {}
    assert {call.q.dtype for call in calls} == {dtype}
    for call, shown in zip(calls, watched.attentions or (), strict=False):
        assert_explains(call, shown)


@pytest.mark.parametrize("length", [1, 2, 5, 6, 63])
def test_odd_lengths(length: int) -> None:
    for name in ("mistral", "bert"):
        for attention in ("eager", "sdpa"):
            inputs = texts(1, length)
            plain, watched, calls, seen = run(build(name, attention), inputs)
            assert same_bits(plain[0], watched[0])
            assert seen.unseen == {}
            wanted = torch.ones(1, 1, length, length, dtype=torch.bool)
            if name == "mistral":
                wanted = wanted.tril() & wanted.triu(-4)
            assert all(torch.equal(seen_keys(call), wanted) for call in calls)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2", "gpt-oss"])
def test_generation_with_a_cache(name: str, cache: str | None) -> None:
    model, inputs = build(name), texts(2, 7, "left")
    calls: list[AttentionCall] = []
    more = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "cache_implementation": cache}
    plain = model.generate(**inputs, **more)
    # A static cache writes over its keys later.
    with watch(model, lambda call: calls.append(replace(call, k=call.k.clone()))) as seen:
        watched = model.generate(**inputs, **more, output_attentions=True, return_dict_in_generate=True)
    assert torch.equal(plain, watched.sequences)
    assert seen.unseen == {}
    shown = [layer for step in watched.attentions for layer in step]
    assert len(shown) == len(calls) == 6 * model.config.num_hidden_layers
    for call, weights in zip(calls, shown, strict=True):
        assert call.mask is None
        assert_explains(call, weights)
    assert calls[0].q.shape[2] == 7
    assert calls[-1].q.shape[2] == 1


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_prompt_in_two_pieces(attention: str) -> None:
    """The second piece has several queries, which see the first one's keys through the cache."""
    from transformers import DynamicCache

    model, inputs = build("mistral", attention), texts(2, 12, "left")
    whole = run(model, inputs)[2]
    calls: list[AttentionCall] = []
    cache = DynamicCache(config=model.config)
    name = "cache" if "cache" in _parameters(model.model.forward) else "past_key_values"  # renamed in transformers 5.2x
    with torch.no_grad(), watch(model, calls.append):
        for start, stop in ((0, 8), (8, 12)):
            mask = inputs["attention_mask"][:, :stop]
            model(input_ids=inputs["input_ids"][:, start:stop], attention_mask=mask, use_cache=True, **{name: cache})
    second = calls[2]
    assert second.mask is None
    kept = second.k.shape[2]
    wanted = seen_keys(whole[0])[:, :, 8:, 12 - kept :]
    assert torch.equal(seen_keys(second), wanted)


def _parameters(function) -> set[str]:
    import inspect

    return set(inspect.signature(function).parameters)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_what_has_no_simple_description_stays_a_mask(attention: str) -> None:
    model = build("llama", attention)
    ids = texts(1, 9)["input_ids"]
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])  # two texts in one row, each blind to the other
    plain, watched, calls, seen = run(model, {"input_ids": ids, "position_ids": packed}, use_cache=False)
    assert same_bits(plain[0], watched[0])
    assert seen.unseen == {}
    wanted = torch.block_diag(torch.ones(4, 4), torch.ones(5, 5)).tril().bool()
    for call in calls:
        assert call.mask is not None
        assert torch.equal(seen_keys(call)[0, 0], wanted)


def test_a_mask_of_ones_own() -> None:
    model = build("llama", "sdpa")
    ids = texts(1, 6)["input_ids"]
    mask = torch.rand(1, 1, 6, 6, generator=torch.Generator().manual_seed(0)) < 0.5
    mask = mask | torch.eye(6, dtype=torch.bool)
    plain, watched, calls, _ = run(model, {"input_ids": ids, "attention_mask": mask})
    assert same_bits(plain[0], watched[0])
    assert torch.equal(seen_keys(calls[0]), mask)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_on_a_gpu(name: str, dtype) -> None:
    """Bitwise too, and described as on the CPU."""
    described = {}
    for padding in PADDINGS:
        described[padding] = run(build(name), texts(padding=padding))[2]
    for attention in ("eager", "sdpa"):
        if attention == "sdpa" and name in ("gemma2", "gpt-oss"):
            continue
        model = build(name, attention, dtype).cuda()
        for padding in PADDINGS:
            inputs = {key: value.cuda() for key, value in texts(padding=padding).items()}
            plain, watched, calls, seen = run(model, inputs)
            assert same_bits(plain[0], watched[0])
            assert seen.unseen == {}
            for call, other in zip(calls, described[padding], strict=True):
                rows = valid_rows(other)[:, None, :, None]
                found = call.visibility.materialize(*call.q.shape[::2], call.k.shape[2], "cuda")
                assert torch.equal(found.cpu() & rows, seen_keys(other) & rows)
