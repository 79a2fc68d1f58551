"""SmolLM2-135M itself: its statistics against maps held in full, and the sink it is known to have.

The model is fetched by ``make test``; where it is not in the cache, these tests are skipped.
"""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from probe_cases import map_measures  # noqa: E402

from theory_lab.models import find_model, load_model  # noqa: E402
from theory_lab.probes import probe, shipped, texts, watch  # noqa: E402

pytestmark = pytest.mark.skipif(
    not find_model("smollm2-135m").cached,
    reason="smollm2-135m is not in the cache: theory-lab models fetch smollm2-135m",
)

NEAR = (1e-6, 1e-3)
#: A handful of float32 roundings on each of the few operations between a score and a measure.
BAND = 16 * 2.0**-24


@pytest.fixture(scope="module")
def loaded():
    return load_model("smollm2-135m")


def maps_of(call, heads: list[int], dtype: torch.dtype) -> np.ndarray:
    """(H, T, S) of these heads by the textbook, in that precision."""
    share = call.q.shape[1] // call.k.shape[1]
    q, k = call.q[:, heads].to(dtype), call.k[:, [head // share for head in heads]].to(dtype)
    logits = (q @ k.transpose(-1, -2)) * call.scale
    hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    return logits.masked_fill(hidden, -torch.inf).softmax(-1)[0].numpy()


def check_against_maps(loaded, length: int, layers: list[int] | None, heads: tuple[int, ...] = (*range(9),)) -> None:
    text = shipped()[0]
    found = probe(loaded, text, lengths=[length // 2 + 1, length], layers=layers).rows
    assert sorted(found["head"].unique()) == [*range(9)]
    found = found[found["head"].isin(heads)]
    ids = torch.tensor([texts.tokenize(loaded.tokenizer, text)[:length]])
    seen = np.tri(length, dtype=bool)
    checked = []

    def observe(call):
        part = found[(found.layer == call.layer) & (found.length == length)].set_index("head")
        exact = maps_of(call, [*heads], torch.float64)
        eager = map_measures(maps_of(call, [*heads], torch.float32), seen, NEAR)
        for name, value in map_measures(exact, seen, NEAR).items():
            mine = part[name].to_numpy()
            assert mine.shape == (len(heads),)
            if name.startswith("near_zero"):
                # A count may differ by the entries that lie within rounding of the bound.
                eps = float(name.removeprefix("near_zero_"))
                near = ((np.abs(exact / eps - 1.0) < 1e-4) & seen).sum((-2, -1)) / seen.sum()
                assert (np.abs(mine - value) <= near + 1e-12).all(), (call.layer, name)
                continue
            allowed = 2.0 * (np.abs(eager[name] - value) + BAND * np.maximum(np.abs(value), 1.0))
            assert (np.abs(mine - value) <= allowed).all(), (call.layer, name, np.abs(mine - value).max())
        checked.append(call.layer)

    with watch(loaded.model, observe, layers=layers), torch.inference_mode():
        loaded.backbone(input_ids=ids, use_cache=False)
    assert len(checked) == (loaded.layers if layers is None else len(layers))


def test_every_layer_and_head_equals_its_map(loaded):
    check_against_maps(loaded, 128, None)


def test_longer_maps(loaded, monkeypatch):
    monkeypatch.setattr(loaded.model.config, "num_hidden_layers", 19)
    check_against_maps(loaded, 513, [0, 5, 10, 18])


def test_the_longest_maps(loaded, monkeypatch):
    # Layers beyond those looked at are left out of the run.
    monkeypatch.setattr(loaded.model.config, "num_hidden_layers", 2)
    # One head of each key head: that is what takes the time here, and all were looked at above.
    check_against_maps(loaded, 2048, [1], heads=(0, 4, 8))


def test_its_sink(loaded):
    # 0.543 at 64 tokens and 0.436 at 256 were measured on another English text, once, with eager maps.
    found = probe(loaded, shipped()[:2], lengths=[64, 256], metrics=["sinks"]).summary()
    ratios = found[found.measure == "g_sink_ratio_1"].set_index("length").estimate
    assert 0.4 < ratios[64] < 0.65
    assert 0.3 < ratios[256] < 0.5
    assert ratios[256] < ratios[64]
