"""Maps of captured attention against the maps that eager models return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from call_weights import weights  # noqa: E402
from tiny_models import ENCODERS, VOCABULARY, build  # noqa: E402

from theory_lab.errors import InputError  # noqa: E402
from theory_lab.models import LoadedModel  # noqa: E402
from theory_lab.probes import Captured, attention_map, capture, sparse_rows  # noqa: E402
from theory_lab.probes.whatif import parse_mechanism  # noqa: E402

TEXT = "the quick brown fox jumps over it"


class Letters:
    """A tokenizer of single bytes, with a first token of its own."""

    def __call__(self, text: str, add_special_tokens: bool = True, **more: Any) -> dict[str, list[int]]:
        ids = [3 + byte % (VOCABULARY - 3) for byte in text.encode()]
        return {"input_ids": [1, *ids] if add_special_tokens else ids}

    def decode(self, ids: list[int], **more: Any) -> str:
        return "\ufffd" if ids[0] == 7 else f"<{ids[0]}>"

    def convert_ids_to_tokens(self, number: int) -> str:
        return f"byte{number}"


def loaded(name: str, **changes: Any) -> LoadedModel:
    model = build(name, **changes)
    return LoadedModel(model, Letters(), name, 2, 4, 2, 6, 256, name not in ENCODERS, Path())


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "gpt-oss", "bert", "modernbert"])
def test_every_head_equals_the_eager_map(name: str) -> None:
    model = loaded(name)
    found = capture(model, TEXT)
    with torch.no_grad():
        shown = model.backbone(input_ids=torch.tensor([found.ids]), output_attentions=True).attentions
    for layer in found.layers:
        _, budget = weights(found.calls[layer])
        for head in range(found.heads(layer)):
            image = torch.tensor(found.map(layer, head).image).double()
            # Both run in float32, so that each is within the budget of the exact map.
            assert bool(((image - shown[layer][0, head].double()).abs() <= 2 * budget[0, head]).all()), (layer, head)


def test_windows_profiles_and_reductions() -> None:
    found = capture(loaded("llama"), TEXT)
    whole = found.map(1, 2).image
    size = len(found.tokens)
    for reduce, of in (("max", np.max), ("sum", np.sum)):
        part = found.map(1, 2, ((9, size), (2, 27)), resolution=(4, 6), reduce=reduce)
        assert part.image.shape == (4, 6)
        for r, c in np.ndindex(4, 6):
            rows = slice(part.row_edges[r], part.row_edges[r + 1])
            columns = slice(part.column_edges[c], part.column_edges[c + 1])
            assert part.image[r, c] == pytest.approx(of(whole[rows, columns]), rel=1e-5, abs=1e-9)
        np.testing.assert_allclose(part.row_profile, of(part.image, 1), rtol=1e-6)
        np.testing.assert_allclose(part.column_profile, of(part.image, 0), rtol=1e-6)
        assert part.row_samples is None
    assert found.map(1, 2, (3, 8)).image.shape == (5, 5)
    assert found.map(1, 2, resolution=4, row_samples=2).row_samples == 2


def test_other_mechanisms_and_views() -> None:
    found = capture(loaded("llama"), TEXT)
    views = [found.map(0, 1, as_="tda:beta=0.2,lambda=0.5", view=view).image for view in (1, 2)]
    whole = found.map(0, 1, as_="tda:beta=0.2,lambda=0.5")
    np.testing.assert_allclose(whole.image, views[0] - 0.5 * views[1], rtol=1e-5, atol=1e-7)
    assert whole.image.min() < 0 < whole.image.max()
    np.testing.assert_array_equal(views[0], found.map(0, 1, as_="tra:beta=0.2").image)
    assert whole.mechanism == parse_mechanism("tda:beta=0.2,lambda=0.5").label
    for other in ("entmax", "eta"):
        np.testing.assert_allclose(found.map(0, 1, as_=other).image.sum(1), 1.0, rtol=1e-5)


def test_sparse_rows_hold_what_the_map_holds() -> None:
    found = capture(loaded("llama"), TEXT)
    size = len(found.tokens)
    image = found.map(1, 3, as_="tra:beta=0.5").image
    kept = sparse_rows(found, None, 1, 3, (5, size), as_="tra:beta=0.5")
    rebuilt = np.zeros_like(image)
    rebuilt[tuple(kept.indices.T)] = kept.values
    np.testing.assert_allclose(rebuilt[5:], image[5:], rtol=1e-5, atol=1e-8)
    assert (kept.values != 0).all()
    assert 0 < len(kept.values) < (size - 5) * size / 2
    assert kept.pointers[-1] == len(kept.values)
    large = found.sparse_rows(1, 3, above=0.2)
    assert (np.abs(large.values) > 0.2).all()
    assert len(large.values) == (found.map(1, 3).image > 0.2).sum()


def test_one_pass_serves_every_head_and_keeps_no_values() -> None:
    model = loaded("llama")
    found = capture(model, TEXT)
    assert [call.v.shape[2] for call in found.calls.values()] == [0, 0]
    alone = attention_map(model, TEXT, 1, 0, (0, 20), resolution=7)
    np.testing.assert_array_equal(alone.image, attention_map(found, None, 1, 0, (0, 20), resolution=7).image)
    assert capture(model, TEXT, layers=[1]).layers == (1,)
    seen: list[int] = []
    short = capture(model, TEXT, length=9, on_layer=seen.append)
    assert (len(short.tokens), seen) == (9, [1, 2])
    # The tokens of a text are the letters', but for a part of a character.
    assert short.tokens[0] == "<1>"
    assert "\ufffd" not in "".join(found.tokens)


def test_thumbnails() -> None:
    found = capture(loaded("llama"), TEXT)
    small = found.thumbnails(0, 5, row_samples=None)
    assert small.shape == (4, 5, 5)
    np.testing.assert_array_equal(small[2], found.map(0, 2, resolution=5).image)
    assert (found.thumbnails(0, 5) <= small).all()


@pytest.fixture(scope="module")
def one() -> Captured:
    return capture(loaded("llama"), TEXT)


@pytest.mark.parametrize(
    ("change", "field", "allowed"),
    [
        ({"layer": 7}, "layer", "layers 0-1 were captured"),
        ({"head": 4}, "head", "heads 0 to 3 of layer 0 are allowed"),
        ({"window": (5, 5)}, "window rows", "0 <= first < last <= 34"),
        ({"window": ((0, 3), (0, 99))}, "window columns", "0 <= first < last <= 34"),
        ({"window": 3}, "window", "is allowed"),
        ({"resolution": 0}, "resolution", "at least 1"),
        ({"reduce": "mean"}, "reduce", "max or sum is allowed"),
        ({"as_": "linear"}, "as", "is allowed"),
        ({"as_": "tra", "view": 1}, "view", "1 or 2, of tda, is allowed"),
        ({"row_samples": 0}, "row_samples", "at least 1"),
        ({"text": "more"}, "text", "nothing, with captured attention"),
        ({"length": 5}, "length", "nothing, with captured attention"),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else None,
)
def test_bad_input_is_named(one: Captured, change: dict[str, Any], field: str, allowed: str) -> None:
    with pytest.raises(InputError) as caught:
        attention_map(**{"model": one, "text": None, "layer": 0, "head": 0, **change})
    assert caught.value.field == field
    assert allowed in str(caught.value)


def test_bad_texts_are_named() -> None:
    model = loaded("llama")
    for text, length, allowed in (("  ", None, "it is empty"), (TEXT, 500, "2 to 34 tokens"), (TEXT, 1, "2 to 34")):
        with pytest.raises(InputError) as caught:
            capture(model, text, length=length)
        assert allowed in str(caught.value)
    with pytest.raises(InputError, match="it has no tokenizer"):
        capture(LoadedModel(model.model, None, "llama", 2, 4, 2, 6, 256, True, Path()), TEXT)
    with pytest.raises(InputError, match="the words themselves"):
        attention_map(model, None, 0, 0)
    with pytest.raises(InputError, match="a number of at least 0"):
        capture(model, TEXT).sparse_rows(0, 0, above=-1.0)


def test_ones_own_tensors() -> None:
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 4, 9, 6, generator=g), torch.randn(1, 2, 9, 6, generator=g)
    mine = Captured.from_tensors(
        "mine", list("abracadab"), [(q, k), (q.flip(2), k)], views=[((k.repeat(1, 2, 1, 1), k),), ()]
    )
    assert (mine.layers, mine.heads(1), mine.size(0)) == ((0, 1), 4, (9, 9))
    assert mine.ids[:5] == (0, 1, 2, 0, 3)
    want = (q[0, 3] @ k[0, 1].T * 6**-0.5).masked_fill(~torch.ones(9, 9).tril().bool(), -torch.inf).softmax(-1)
    np.testing.assert_allclose(mine.map(0, 3).image, want.numpy(), rtol=1e-5, atol=1e-7)
    # A second view of one's own is the one that TDA subtracts.
    second = mine.map(0, 1, as_="tda:beta=0.1", view=2).image
    alone = Captured.from_tensors("views", list("abracadab"), [(k.repeat(1, 2, 1, 1), k)]).map(0, 1, as_="tra:beta=0.1")
    np.testing.assert_array_equal(second, alone.image)
    with pytest.raises(InputError, match="for 8 tokens"):
        Captured.from_tensors("short", list("abracada"), [(q, k)])
