"""Probing a tiny model: equality to maps, calls that add up, what is kept, what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from probe_cases import WORDS, map_measures, tiny_llama  # noqa: E402
from theory_kernels import attention_statistics, pooled_map  # noqa: E402
from tiny_models import build  # noqa: E402

from theory_lab.errors import InputError  # noqa: E402
from theory_lab.probes import Text, probe, running, shipped, texts, watch  # noqa: E402  # noqa: E402
from theory_lab.probes.accumulate import HeadSums, head_measures, pack  # noqa: E402
from theory_lab.probes.running import segment  # noqa: E402
from theory_lab.probes.shares import key_shares  # noqa: E402
from theory_lab.probes.whatif import parse_mechanism  # noqa: E402

TEXT = WORDS * 4
LENGTHS = (7, 31, 90)
NEAR = (1e-6, 1e-3)


def eager_maps(loaded, ids: list[int]) -> list[np.ndarray]:
    """(H, T, T) of each layer, from the model's own eager attention in float64."""
    import copy

    model = copy.deepcopy(loaded.model).double()
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        maps = model.base_model(torch.tensor([ids]), output_attentions=True, use_cache=False).attentions
    return [m[0].numpy() for m in maps]


@pytest.mark.parametrize("bos", [False, True], ids=["bare", "bos"])
def test_measures_are_those_of_eager_maps_at_every_length(bos: bool):
    loaded = tiny_llama(bos=bos)
    found = probe(loaded, TEXT, lengths=LENGTHS)
    assert len(found.rows) == len(LENGTHS) * 2 * 4
    ids = loaded.tokenizer(TEXT)["input_ids"]
    for length in LENGTHS:
        # Each length by a run of its own: the rows of a longer sequence must be those of the shorter one.
        for layer, maps in enumerate(eager_maps(loaded, ids[:length])):
            part = found.rows[(found.rows.length == length) & (found.rows.layer == layer)].set_index("head")
            truth = map_measures(maps, np.tri(length, dtype=bool), NEAR)
            for name, values in truth.items():
                # float32 queries and keys against float64 ones: a few units in the last place, through exponentials.
                band = 1e-4 if name.startswith("near_zero") else 2e-5
                assert part[name].to_numpy() == pytest.approx(values, abs=band), (length, layer, name)


@pytest.mark.parametrize("weights", ["softmax", "tra", "tda", "entmax", "eta"])
def test_segments_and_decoding_steps_add_up_to_the_whole_call(weights: str):
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, 4, 21, 8), (2, 2, 21, 8)) * (2 if weights == "tda" else 1)
    tensors = tuple(3.0 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    arguments = {"weights": weights, "causal": True, "query_offset": 0, "lengths": torch.tensor([21, 17])}
    if weights == "eta":
        arguments["eta_threshold"] = 0.5
    more = {"need": ("rows", "columns", "near_zero", "scores"), "exponents": (-1.0, 2.0), "levels": (0.5,)}
    unit = weights not in ("tra", "tda")

    def measured(cuts: list[int]) -> dict[str, np.ndarray]:
        sums = HeadSums(unit_rows=unit)
        for start, stop in zip([0, *cuts], [*cuts, 21], strict=True):
            pieces, given = segment(tensors, arguments, start, stop)
            sums.add(attention_statistics(*pieces, **given, **more))
        packed = pack([sums.snapshot((1, 3))])
        return packed | head_measures(packed, near_zero=(1e-6, 1e-3), sink_keys=(1, 3))

    whole = measured([])
    for cuts in ([5], [1, 2, 20], list(range(1, 21))):
        parts = measured(cuts)
        assert parts.keys() == whole.keys()
        for name, value in whole.items():
            assert parts[name] == pytest.approx(value, rel=1e-9, abs=1e-9, nan_ok=True), name


def test_a_length_three_text_in_a_longer_buffer_has_three_rows():
    q = torch.randn(1, 2, 9, 4)
    sums = HeadSums()
    sums.add(attention_statistics(q, q, lengths=torch.tensor([3])))
    found = head_measures(pack([sums.snapshot()]))
    assert found["rows"].tolist() == [[[3, 3]]]
    assert found["visible"].tolist() == [[[6, 6]]]


def test_windows_and_layers_and_heads_are_as_asked_for():
    loaded = tiny_llama()
    found = probe(loaded, [TEXT, TEXT[50:]], lengths=[20], windows=3, layers=[1], heads=[0, 2], metrics=["entropy"])
    assert found.rows.groupby(["text", "window", "layer", "head"]).ngroups == len(found.rows) == 2 * 3 * 1 * 2
    assert set(found.rows.layer) == {1}
    assert not [name for name in found.rows if "sink" in name or "zero" in name]
    starts = found.rows.groupby(["text", "window"]).start.first()
    assert starts["text 1"].diff().dropna().ge(20).all()
    again = probe(loaded, [TEXT, TEXT[50:]], lengths=[20], windows=3, layers=[1], heads=[0, 2], metrics=["entropy"])
    pd.testing.assert_frame_equal(found.rows, again.rows)


def test_summary_has_an_interval_over_texts_and_none_for_one():
    loaded = tiny_llama()
    one = probe(loaded, TEXT, lengths=[20]).summary()
    assert one.ci_low.isna().all()
    several = probe(loaded, [TEXT[at:] for at in (0, 30, 60, 90)], lengths=[20])
    table = several.summary().set_index("measure")
    row = table.loc["g_sink_ratio_1"]
    assert row.ci_low < row.estimate < row.ci_high
    by_hand = several.rows.groupby("text").g_sink_ratio_1.mean().mean()
    assert row.estimate == pytest.approx(by_hand, rel=1e-12)
    rate = (several.rows.sink_weight_1 > 0.3).mean()
    assert table.loc["sink_rate_1"].estimate == pytest.approx(rate, rel=1e-12)
    layers = several.summary(by_layer=True)
    assert set(layers.layer) == {0, 1}


@pytest.mark.parametrize("spec", ["tra:beta=0.5", "tda:beta=0.5,lambda=0.25", "tda:views=neighbors", "entmax", "eta"])
def test_what_if_weights_are_those_of_the_reference(spec: str):
    loaded = tiny_llama()
    found = probe(loaded, TEXT, lengths=[16, 40], as_=spec)
    mechanism = parse_mechanism(spec)
    assert set(found.rows.weights) == {mechanism.label}
    assert parse_mechanism(mechanism.label) == mechanism
    truth = {}

    def observe(call):
        tensors, arguments = mechanism.inputs(call)
        exact = attention_statistics(*(x.double() for x in tensors), **arguments, implementation="reference")
        truth[call.layer] = exact

    ids = torch.tensor([loaded.tokenizer(TEXT)["input_ids"][:40]])
    with watch(loaded.model, observe), torch.inference_mode():
        loaded.model.base_model(ids, use_cache=False)
    rows = found.rows[found.rows.length == 40]
    for layer, exact in truth.items():
        part = rows[rows.layer == layer]
        assert part.max_abs.to_numpy() == pytest.approx(exact.maximum[0].amax(-1).numpy(), abs=1e-5)
        assert part.entropy.to_numpy() == pytest.approx(exact.entropy[0].mean(-1).numpy(), abs=1e-3)
        if spec.startswith("t"):
            counts = exact.survivors[:, 0].double().mean(-1)
            names = ["survivors"] if len(counts) == 1 else ["survivors_1", "survivors_2"]
            for name, count in zip(names, counts, strict=True):
                assert part[name].to_numpy() == pytest.approx(count.numpy(), abs=0.05)  # one borderline key in 40 rows
    assert ("sparsity_2" in rows) == ("view_correlation" in rows) == spec.startswith("tda")


@pytest.mark.parametrize("spec", ["tra:beta=0.5,kappa=2", "tda:beta=0.5,lambda=0.25,p=1"])
def test_sink_weights_of_thresholded_weights_are_shares_of_their_rows(spec: str):
    loaded = tiny_llama()
    mechanism = parse_mechanism(spec)
    found = probe(loaded, TEXT, lengths=[16, 40], as_=spec, metrics=["sinks"], sink_keys=(1, 3, 20))
    truth = {}

    def observe(call):
        tensors, arguments = mechanism.inputs(call)
        truth[call.layer] = pooled_map(*(x.double() for x in tensors), **arguments, resolution=40)[0].abs().numpy()

    ids = torch.tensor([loaded.tokenizer(TEXT)["input_ids"][:40]])
    with watch(loaded.model, observe), torch.inference_mode():
        loaded.model.base_model(ids, use_cache=False)
    for length in (16, 40):
        for layer, maps in truth.items():
            part = found.rows[(found.rows.length == length) & (found.rows.layer == layer)]
            w = maps[:, :length, :length]
            shares = w / (w.sum(-1, keepdims=True) + 1e-8)
            for k in (1, 3, 20):
                alpha = shares[:, k - 1 :, k - 1].mean(-1) if k <= length else np.full(4, np.nan)
                # float32 queries and keys; a share's error is that of a weight over its row's sum
                assert part[f"sink_weight_{k}"].to_numpy() == pytest.approx(alpha, abs=1e-4, nan_ok=True)
    rates = found.summary().set_index(["length", "measure"]).estimate
    assert rates[40, "sink_rate_1"] == (found.rows[found.rows.length == 40].sink_weight_1 > 0.3).mean()


@pytest.mark.parametrize("causal", [True, False])
def test_shares_of_single_keys_are_those_of_the_map(causal: bool):
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(2, h, 13, 4, generator=generator, dtype=torch.float64) for h in (4, 2))
    q[:, :, 6] = k[:, :, 4] = 0.0
    arguments = {"weights": "tra", "beta": torch.tensor([0.2, 0.4, 0.6, 5.0], dtype=torch.float64), "causal": causal}
    arguments |= {"window": 7, "query_offset": 2 if causal else 0, "lengths": torch.tensor([13, 9])}
    maps = pooled_map(q, k, **arguments, resolution=13)
    found = attention_statistics(q, k, **arguments)
    truth = (maps / (maps.sum(-1, keepdim=True) + 1e-8)).sum(-2)
    assert torch.allclose(key_shares((q, k), arguments, range(13), found.visible, found.mass), truth, 1e-12, 1e-12)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_uniform_baseline_of_an_encoder_with_windows(attention: str):
    model = build("modernbert", attention)
    loaded = SimpleNamespace(**{**vars(tiny_llama()), "model": model, "layers": 3, "causal": False})
    rows = probe(loaded, TEXT, lengths=[20], heads=[0], layers=[0, 1]).rows.set_index("layer")
    i = np.arange(20)
    for layer, width in ((0, 20), (1, 3)):
        sees = np.abs(i[:, None] - i) <= width
        assert rows.visible[layer] == sees.sum()
        assert rows.g_sink_uniform_1[layer] == pytest.approx((sees / sees.sum(-1, keepdims=True))[:, 0].sum() / 20)


def test_scores_of_an_encoder_with_windows_leave_out_the_key_of_the_row_itself():
    model = build("modernbert", "sdpa")
    calls = []
    with watch(model, calls.append):
        model(torch.arange(3, 23)[None])
    i = np.arange(20)
    apart = np.abs(i[:, None] - i)
    call = calls[1]
    found = attention_statistics(call.q, call.k, **call.statistics_arguments(), need=("scores",)).scores[0]
    scores = (call.q.double() @ call.k.double().mT)[0].numpy()[:, (apart >= 1) & (apart <= 3)]
    assert found.count[0].tolist() == [scores.shape[1]] * call.q.shape[1]
    assert found.mean[0].numpy() == pytest.approx(scores.mean(-1), rel=1e-5)


def test_results_of_other_settings_do_not_mix(tmp_path):
    loaded = tiny_llama()
    first = probe(loaded, TEXT, lengths=[16], out=tmp_path / "kept")
    for more in ({"sink_keys": (1, 2)}, {"as_": "tra"}, {"metrics": ["sinks"]}, {"rope_scaling": "linear:2"}):
        probe(loaded, TEXT, lengths=[16], out=tmp_path / "kept", **more)
    loaded.model.set_attn_implementation("eager")
    probe(loaded, TEXT, lengths=[16], out=tmp_path / "kept")
    assert len(list((tmp_path / "kept" / "cells").iterdir())) == 6
    again = probe(tiny_llama(), TEXT, lengths=[16], out=tmp_path / "kept")
    pd.testing.assert_frame_equal(again.rows, first.rows)
    assert len(list((tmp_path / "kept" / "cells").iterdir())) == 6


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_every_backend_and_mode_gives_the_same_measures(attention: str):
    loaded = tiny_llama()
    plain = probe(loaded, TEXT, lengths=[20]).rows
    loaded.model.set_attn_implementation(attention)
    with torch.inference_mode():
        found = probe(loaded, TEXT, lengths=[20]).rows
    numbers = plain.select_dtypes("number").columns
    assert np.allclose(plain[numbers], found[numbers], rtol=1e-4, atol=1e-5, equal_nan=True)


def test_results_are_kept_and_continued(tmp_path, monkeypatch):
    loaded, sources = tiny_llama(), [Text("a", TEXT), Text("b", TEXT[9:]), Text("c", TEXT[30:])]
    whole = probe(loaded, sources, lengths=[8, 24])
    passes = []
    real = running.run_backbone

    def failing(model, ids):
        passes.append(len(ids))
        if len(passes) == 3:
            raise KeyboardInterrupt
        real(model, ids)

    monkeypatch.setattr(running, "run_backbone", failing)
    partial = []
    with pytest.raises(KeyboardInterrupt):
        probe(loaded, sources, lengths=[8, 24], out=tmp_path / "kept", on_partial=partial.append)
    assert set(partial[0].rows.text) == {"a", "b"}
    assert not partial[0].complete
    again = probe(loaded, sources, lengths=[8, 24], out=tmp_path / "kept")
    assert len(passes) == 4  # the third text alone was left
    pd.testing.assert_frame_equal(again.rows, whole.rows, check_dtype=False)
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "kept" / "rows.parquet"), whole.rows, check_dtype=False)


def test_out_of_memory_keeps_layers_and_goes_on_with_shorter_lengths(monkeypatch):
    loaded = tiny_llama()
    real = attention_statistics

    def hungry(q, k, *more, **arguments):
        if k.shape[2] == 24 and hungry.calls:
            raise torch.OutOfMemoryError("CUDA out of memory")
        hungry.calls += k.shape[2] == 24
        return real(q, k, *more, **arguments)

    hungry.calls = 0
    monkeypatch.setattr("theory_kernels.attention_statistics", hungry)
    found = probe(loaded, TEXT, lengths=[8, 24])
    assert not found.complete
    assert "1 of 2 layers are kept; going on with 8" in found.notes[0]
    assert found.rows.groupby("length").layer.nunique().to_dict() == {8: 2, 24: 1}


def test_a_longer_length_than_the_positions_warns_and_can_be_scaled():
    loaded = tiny_llama(max_position_embeddings=32)
    found = probe(loaded, TEXT, lengths=[48])
    assert "beyond the model's 32 positions" in found.notes[0]
    assert "yarn:2" in found.notes[0]
    scaled = probe(loaded, TEXT, lengths=[16, 48], rope_scaling="dynamic:2")
    pd.testing.assert_frame_equal(probe(loaded, TEXT, lengths=[48]).rows, found.rows)  # the caller's model is as before
    assert "dynamic:2" in scaled.notes[0]
    plain = probe(tiny_llama(max_position_embeddings=32), TEXT, lengths=[16]).rows
    short = scaled.rows[scaled.rows.length == 16]
    # Dynamic scaling leaves short texts alone: 16 tokens must have been a run of their own.
    assert short.entropy.to_numpy() == pytest.approx(plain.entropy.to_numpy(), rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"lengths": [0]}, "lengths: 0"),
        ({"lengths": [5000]}, "has 632 tokens: ask for at most 632"),
        ({"lengths": [200], "windows": 4}, "200 in 4 windows.* at most 158, or for at most 3 windows, or give"),
        ({"lengths": [2], "windows": 999}, "ask for at most 316 windows, or give a longer text"),
        ({"layers": [2]}, "layers: 2; the model has 2"),
        ({"heads": [-1]}, "heads: -1"),
        ({"metrics": ["sink"]}, "metrics: sink"),
        ({"as_": "trra"}, "did you mean 'tra'"),
        ({"as_": "tra:gamma=1"}, "no option of tra"),
        ({"as_": "tra:p=0.5"}, "at least 1"),
        ({"as_": "tra:p=1,p=2"}, "p is given twice"),
        ({"rope_scaling": "yarn"}, "rope-scaling: yarn"),
        ({"near_zero": [0.0]}, "near_zero: 0.0"),
        ({"seed": -1}, "seed: -1"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_bad_input_is_one_line(arguments: dict, words: str):
    with pytest.raises(InputError, match=words):
        probe(tiny_llama(), TEXT, **arguments)


def test_an_empty_text_and_a_foreign_folder_are_refused(tmp_path):
    with pytest.raises(InputError, match="it is empty"):
        probe(tiny_llama(), " \n")
    (tmp_path / "other.txt").write_text("mine")
    with pytest.raises(InputError, match="new, empty or probe results folder"):
        probe(tiny_llama(), TEXT, out=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["other.txt"]
    with pytest.raises(InputError, match="layers: 9"):
        probe(tiny_llama(), TEXT, layers=[9], out=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_tda_needs_a_second_view():
    loaded = tiny_llama(num_key_value_heads=4)
    with pytest.raises(InputError, match="no query heads that share keys"):
        probe(loaded, TEXT, lengths=[16], as_="tda")
    assert len(probe(loaded, TEXT, lengths=[16], as_="tda:views=neighbors").rows)


@pytest.mark.parametrize("raw", ["plain ünicode".encode(), "\ufeffbyte order".encode(), "sixteen".encode("utf-16")])
def test_texts_are_read_in_their_encoding(raw: bytes, tmp_path):
    (tmp_path / "t.txt").write_bytes(raw)
    found = texts.read_text(tmp_path / "t.txt").content
    assert found in ("plain ünicode", "byte order", "sixteen")


def test_unreadable_texts_are_refused(tmp_path):
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (tmp_path / "empty.txt").write_bytes(b"")
    for name, words in (("latin.txt", "not UTF-8"), ("empty.txt", "empty"), ("no.txt", "not found"), (".", "folder")):
        with pytest.raises(InputError, match=words):
            texts.read_text(tmp_path / name)


def test_shipped_texts_are_there():
    found = shipped()
    assert len(found) == 6
    assert all(len(text.content) > 50_000 and text.content.isascii() for text in found)
