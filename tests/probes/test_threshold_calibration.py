"""Constant thresholds: the mass they prune, the model they make, and what they save, against maps held in full."""

from __future__ import annotations

import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from probe_cases import WORDS, tiny_llama

from theory_lab.calibration import Calibration, calibrate_thresholds, measure_learned, read_thresholds
from theory_lab.errors import InputError
from theory_lab.probes.texts import Text, as_text
from theory_lab.probes.watching import watch
from theory_lab.pruning import Pruned, pruned_attention

LENGTH = 96
FIRST, SECOND = as_text("first", WORDS * 2), as_text("second", WORDS[::-1] * 2)


@pytest.fixture(scope="module")
def loaded() -> SimpleNamespace:
    return tiny_llama(seed=3)


def calibrated(loaded: SimpleNamespace, target: float, **more: object) -> Calibration:
    settings = {"held_out": SECOND, "length": LENGTH, "block": 16, **more}
    return calibrate_thresholds(loaded, FIRST, target, **settings)


def window(loaded: SimpleNamespace, text: Text) -> torch.Tensor:
    return torch.tensor([loaded.tokenizer(text.content)["input_ids"][:LENGTH]])


def scores(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Logits (layers, H, T, T) in float64, -inf where masked."""
    found = []

    def see(call) -> None:
        k = call.k[0].double().repeat_interleave(2, 0)
        full = call.scale * (call.q[0].double() @ k.mT)
        found.append(full.masked_fill(torch.ones_like(full, dtype=torch.bool).triu(1), -math.inf))

    with watch(model, see), torch.no_grad():
        model(input_ids=ids, use_cache=False)
    return torch.stack(found)


@pytest.mark.parametrize("target", [0.01, 0.2])
def test_the_largest_threshold_within_the_mass(loaded: SimpleNamespace, target: float) -> None:
    found = calibrated(loaded, target)
    s = scores(loaded.model, window(loaded, FIRST))
    tau = torch.tensor(found.thresholds, dtype=torch.float64)[..., None, None]
    # Watched scores are float32's: a key that close to a threshold may be on either side.
    width = 1e-4
    weights = torch.softmax(s, -1)
    lost = (weights * (s < tau - width)).sum(-1).mean(-1)
    assert bool((lost <= target).all())
    assert torch.allclose(torch.tensor(found.pruned_mass, dtype=torch.float64), lost, atol=1e-2)
    # One bin higher, a 2048th of the spread of the scores, it would be too much.
    spread = s.amax((-1, -2)) - s.masked_fill(s == -math.inf, math.inf).amin((-1, -2))
    higher = tau + width + 2.0 * spread[..., None, None] / 4096
    assert bool(((weights * (s < higher)).sum(-1).mean(-1) > target).all())


def test_the_pruned_model_is_softmax_over_the_survivors(loaded: SimpleNamespace) -> None:
    ids = window(loaded, SECOND)
    tau = torch.tensor(calibrated(loaded, 0.1).thresholds)
    found = []

    def see(call) -> None:
        full = scores_of(call)
        kept = full >= tau[call.layer].double()[:, None, None]
        p = torch.softmax(full.masked_fill(~kept, -math.inf), -1).nan_to_num(0.0)
        found.append((p @ call.v[0].double().repeat_interleave(2, 0)).transpose(0, 1).flatten(1))

    def scores_of(call) -> torch.Tensor:
        full = call.scale * (call.q[0].double() @ call.k[0].double().repeat_interleave(2, 0).mT)
        return full.masked_fill(torch.ones_like(full, dtype=torch.bool).triu(1), -math.inf)

    first = loaded.model.model.layers[0].self_attn
    seen: list[torch.Tensor] = []
    handle = first.o_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0].double()))
    before = loaded.model.config._attn_implementation
    with torch.no_grad():
        with watch(loaded.model, see, layers=[0]):
            plain = loaded.model(input_ids=ids, use_cache=False).logits
        with pruned_attention(loaded.model, tau):
            pruned = loaded.model(input_ids=ids, use_cache=False).logits
        with pruned_attention(loaded.model, torch.full_like(tau, -math.inf)):
            same = loaded.model(input_ids=ids, use_cache=False).logits
    handle.remove()
    assert loaded.model.config._attn_implementation == before
    assert float((seen[1] - found[0]).abs().max()) <= 1e-5
    assert float((same - plain).abs().max()) <= 1e-4 * float(plain.abs().max())
    assert float((pruned - plain).abs().max()) > 1e-3


def test_what_is_saved_is_counted(loaded: SimpleNamespace) -> None:
    """The first layer's scores do not depend on the pruning, so that its counts can be had from a plain run."""
    found = calibrated(loaded, 0.1)
    s = scores(loaded.model, window(loaded, SECOND))[0]
    kept = s >= torch.tensor(found.thresholds[0], dtype=torch.float64)[:, None, None]
    pairs = LENGTH * (LENGTH + 1) / 2
    saved = 1.0 - kept.sum((-1, -2)) / pairs
    assert found.saved_by_head[0] == pytest.approx(saved.tolist(), abs=3 / pairs)
    assert 0.0 < found.saved_blocks < found.saved_keys < 1.0
    assert set(found.density) == {"16", "32", "64"}
    everything = calibrated(loaded, 1e-9)
    assert everything.saved_keys == pytest.approx(0.0, abs=1e-3)
    assert everything.change == pytest.approx(0.0, abs=1e-5)
    assert everything.dead_rows == 0.0


def test_counts_of_a_small_map() -> None:
    q = torch.tensor([1.0, 1.0, 1.0]).reshape(1, 1, 3, 1)
    k = torch.tensor([1.0, 0.0, 2.0]).reshape(1, 1, 3, 1)
    counts = Pruned(2)
    counts.add(0, q, k, torch.tensor([1.0]), 1.0)
    # Rows see 1 of 1, 1 of 2 and 2 of 3 keys; 1 of 1, 1 of 1 and 2 of 2 blocks.
    assert counts.saved_keys == pytest.approx(1 - 4 / 6)
    assert counts.saved_blocks == 0.0
    counts.add(0, q, k, torch.tensor([1.5]), 1.0)
    assert counts.saved_keys == pytest.approx(1 - 5 / 12)
    assert counts.saved_blocks == pytest.approx(1 - 5 / 8)
    assert counts.dead_rows == pytest.approx(2 / 6)


def test_a_bound_of_the_loss_holds_where_it_was_searched(loaded: SimpleNamespace) -> None:
    found = calibrated(loaded, 0.002, criterion="loss")
    ids = window(loaded, FIRST)

    def loss() -> float:
        with torch.no_grad():
            logits = loaded.model(input_ids=ids, use_cache=False).logits[0, :-1]
        return float(torch.nn.functional.cross_entropy(logits, ids[0, 1:]))

    plain = loss()
    with pruned_attention(loaded.model, torch.tensor(found.thresholds)):
        assert loss() / plain - 1.0 <= 0.002 + 1e-6
    assert 1e-5 <= found.budget < 0.9


def test_intervals_and_files(loaded: SimpleNamespace, tmp_path) -> None:
    found = calibrated(loaded, 0.05, windows=2)
    assert found.windows == 2
    assert found.change_low <= found.change <= found.change_high
    file = tmp_path / "thresholds.json"
    file.write_text(found.to_json())
    assert torch.equal(read_thresholds(file), torch.tensor(found.thresholds))
    assert json.loads(found.to_json())["saved_keys"] == found.saved_keys
    rows = found.rows()
    assert list(rows.columns) == ["layer", "head", "threshold", "pruned_mass", "saved_keys"]
    assert len(rows) == 8
    none = dataclasses.replace(found, thresholds=((-math.inf,),))
    file.write_text(none.to_json())
    assert read_thresholds(file).tolist() == [[-math.inf]]
    for bad in ("{}", "not json"):
        file.write_text(bad)
        with pytest.raises(InputError, match="thresholds"):
            read_thresholds(file)


def elastic_model() -> SimpleNamespace:
    from theory_lab.models.lab import LabForCausalLM, make_config

    torch.manual_seed(0)
    config = make_config(
        "recall", "eta-logit", vocab_size=64, hidden_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        intermediate_size=24, num_hidden_layers=2, max_positions=256,
    )  # fmt: skip
    model = LabForCausalLM(config).eval().requires_grad_(False)
    for layer in model.model.layers:
        layer.attention.mechanism.b.copy_(torch.tensor([0.0, -0.5]))
    return SimpleNamespace(**{**vars(tiny_llama()), "model": model, "heads": 2, "key_heads": 1, "name": "elastic"})


def test_only_softmax_is_calibrated() -> None:
    with pytest.raises(InputError, match="softmax attention; this layer's is ETALogit"):
        calibrate_thresholds(elastic_model(), FIRST, held_out=SECOND, length=LENGTH, block=16)


def test_weights_that_are_no_numbers_are_refused() -> None:
    loaded = elastic_model()
    loaded.model.model.layers[1].attention.mechanism.b.fill_(math.nan)
    with watch(loaded.model, lambda _: None) as seen, torch.no_grad():
        loaded.model(input_ids=window(loaded, SECOND), use_cache=False)
    with pytest.raises(InputError, match=r"layers not watched: 1 \(its output is not finite\); seen: 0"):
        seen.check()


@pytest.mark.parametrize("prune", ["renormalize", "exact"])
def test_learned_thresholds_are_measured(prune: str) -> None:
    loaded = elastic_model()
    mechanisms = [layer.attention.mechanism for layer in loaded.model.model.layers]
    found = measure_learned(loaded, SECOND, length=LENGTH, block=16, prune=prune)
    assert [m.prune for m in mechanisms] == [None, None]
    seen = []

    def see(call) -> None:
        full = call.scale * (call.q[0].double() @ call.k[0].double().mT)
        w, b = mechanisms[call.layer].w.double(), mechanisms[call.layer].b.double()
        tau = torch.sigmoid((call.q[0].double() * w[:, None]).sum(-1) + b[:, None])
        assert found.thresholds[call.layer] == pytest.approx(tau.mean(-1).tolist(), abs=1e-5)
        kept = (full >= tau[..., None]).tril()
        seen.append(1.0 - kept.sum((-1, -2)) / (LENGTH * (LENGTH + 1) / 2))

    with watch(loaded.model, see, layers=[0]), torch.no_grad():
        loaded.model(input_ids=window(loaded, SECOND), use_cache=False)
    assert found.saved_by_head[0] == pytest.approx(seen[0].tolist(), abs=1e-3)
    assert found.criterion == "learned"
    assert json.loads(found.to_json())["target"] is None
    assert found.pruned_loss != found.loss


def test_only_learned_thresholds_are_measured(loaded: SimpleNamespace) -> None:
    with pytest.raises(InputError, match="attend by ETA"):
        measure_learned(loaded, SECOND, length=LENGTH)
    with pytest.raises(InputError, match="prune"):
        measure_learned(loaded, SECOND, length=LENGTH, prune="all")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"target": 0.0}, "target"),
        ({"target": 1.0}, "target"),
        ({"criterion": "speed"}, "criterion"),
        ({"length": 1}, "length"),
        ({"length": 100_000}, "length"),
        ({"windows": 0}, "windows"),
        ({"block": 0}, "block"),
        ({"held_out": FIRST}, "held-out"),
        ({"held_out": []}, "text"),
    ],
    ids=str,
)
def test_bad_input(loaded: SimpleNamespace, arguments: dict, field: str) -> None:
    given = {"target": 0.1, "length": LENGTH, "held_out": SECOND, **arguments}
    with pytest.raises(InputError) as caught:
        calibrate_thresholds(loaded, FIRST, **given)
    assert caught.value.field == field


def test_a_model_that_cannot_be_pruned_is_left_as_it_was(loaded: SimpleNamespace) -> None:
    before = loaded.model.config._attn_implementation
    with pytest.raises(InputError, match="thresholds of 2 layers"), pruned_attention(loaded.model, torch.zeros(3, 4)):
        pass
    tau = torch.zeros(2, 3)
    with pytest.raises(InputError, match="the 4 of the model"), torch.no_grad(), pruned_attention(loaded.model, tau):
        loaded.model(input_ids=window(loaded, FIRST), use_cache=False)
    with (
        pytest.raises(InputError, match="one sequence"),
        torch.no_grad(),
        pruned_attention(loaded.model, torch.zeros(2, 4)),
    ):
        loaded.model(input_ids=window(loaded, FIRST).expand(2, -1), use_cache=False)
    assert loaded.model.config._attn_implementation == before


def test_the_command(loaded: SimpleNamespace, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    import theory_lab.models as models
    from theory_lab.commands.calibrate import command

    monkeypatch.setattr(models, "load_model", lambda *_, **__: loaded)
    first, second, out = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "t.json"
    first.write_text(FIRST.content)
    second.write_text(SECOND.content)
    words = ["tiny", "--text", first, "--held-out", second, "--length", LENGTH, "--out", out, "--quiet"]
    done = CliRunner().invoke(command, [str(word) for word in words], standalone_mode=False)
    assert done.exception is None, done.exception
    assert "keys not computed" in done.output
    assert read_thresholds(out).shape == (2, 4)
    for bad, field in (
        (["--out", str(tmp_path)], "out"),
        (["--target", "two"], "target"),
        (["--block", "1.5"], "block"),
    ):
        done = CliRunner().invoke(command, ["tiny", *bad], standalone_mode=False)
        assert isinstance(done.exception, InputError)
        assert done.exception.field == field
