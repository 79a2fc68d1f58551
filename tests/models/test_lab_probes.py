"""Probes and maps of models with a mechanism of their own, against the weights that the model returns."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
tf = pytest.importorskip("transformers")
pytest.importorskip("pandas")

from theory_lab import InputError  # noqa: E402
from theory_lab.explore.session import Session  # noqa: E402
from theory_lab.models.lab import LabForCausalLM, language_mechanisms, make_config  # noqa: E402
from theory_lab.probes import own  # noqa: E402
from theory_lab.probes.accumulate import GROUPS  # noqa: E402
from theory_lab.probes.maps import Captured  # noqa: E402
from theory_lab.probes.plan import Plan  # noqa: E402
from theory_lab.probes.running import Watched  # noqa: E402
from theory_lab.probes.texts import Window  # noqa: E402
from theory_lab.probes.watching import watch  # noqa: E402
from theory_lab.probes.whatif import parse_mechanism  # noqa: E402
from theory_lab.settings import Silent  # noqa: E402

LENGTHS = (21, 33)
WINDOW = Window("text", "", 0, 0, ())
EPS = torch.finfo(torch.float32).eps


def make(attention: str, **more) -> LabForCausalLM:
    torch.manual_seed(0)
    parameters = {"beta": [0.3, 0.5]} if attention[:3] in ("tra", "tda") else {}
    config = make_config("recall", attention, vocab_size=40, attention_parameters=parameters, **more)
    return LabForCausalLM(config).eval()


def watched(model, as_: str | None = None, lengths=LENGTHS):
    """Rows of a probe over one text, its calls, and the maps that the model returns, (layers, H, T, T)."""
    ids = torch.randint(3, 40, (1, lengths[-1]), generator=torch.Generator().manual_seed(1))
    plan = Plan(lengths, (0, 1), (0, 1), GROUPS, parse_mechanism(as_), 1, 0)
    calls = []
    pass_ = Watched(plan, lengths, Silent(), 1.0)

    def look(call):
        calls.append(call)
        pass_(call)

    with torch.no_grad():
        with watch(model, look) as seen:
            model.model(ids, use_cache=False)
        seen.check()
        maps = torch.stack([layer[0] for layer in model(ids, output_attentions=True).attentions])
    return pass_.frame(WINDOW, "model"), calls, maps


@pytest.mark.parametrize("name", language_mechanisms())
def test_a_probe_measures_the_models_own_weights(name):
    rows, calls, maps = watched(make(name))
    for length in LENGTHS:
        part = rows[rows.length == length].sort_values(["layer", "head"])
        w = maps[:, :, :length, :length].abs().double().flatten(0, 1)
        visible = length * (length + 1) / 2
        mass = w.sum((1, 2))
        share = w / w.sum(-1, keepdim=True).clamp_min(1e-300)
        entropy = torch.special.entr(share).sum(-1).mean(-1)
        wanted = {
            "sparsity": 1 - (w != 0).sum((1, 2)) / visible,
            "g_sink_ratio_1": w[:, :, 0].sum(-1) / mass,
            "max_abs": w.amax((1, 2)),
            "entropy": entropy,
            "dead_rows": (w.sum(-1) == 0).double().mean(-1),
            "sink_weight_1": (w[:, :, 0] / (w.sum(-1) + 1e-8)).mean(-1),
        }
        for measure, value in wanted.items():
            # A key at a threshold may fall on either side in float32: one of the visible pairs.
            allowed = 2 / visible if measure in ("sparsity", "dead_rows") else 256 * EPS * max(1.0, float(value.max()))
            assert np.abs(part[measure].to_numpy(float) - value.numpy()).max() <= allowed, measure
    if calls[0].own is not None and calls[0].own.mechanism.views == 2:
        s1, s2 = (
            calls[0].own.mechanism.scores(q, k)[0, :].double() for q, k in ((calls[0].q, calls[0].k), *calls[0].views)
        )
        off = torch.ones(LENGTHS[-1], LENGTHS[-1]).tril(-1).bool()
        first = rows[(rows.length == LENGTHS[-1]) & (rows.layer == 0)].sort_values("head")
        for head in (0, 1):
            pair = np.corrcoef(s1[head][off].numpy(), s2[head][off].numpy())[0, 1]
            assert first.view_correlation.to_numpy()[head] == pytest.approx(pair, abs=1e-5)
        assert {"sparsity_1", "sparsity_2", "max_abs_1", "max_abs_2"} <= set(rows)
        assert ("lift" in rows) == (name != "diff-softmax")


@pytest.mark.parametrize("name", ["tda", "tda-sharp", "asentmax", "eta-logit", "lssa", "diff-softmax", "softmax"])
def test_maps_are_the_models_own(name):
    more = {"positions": "nape", "nape_slope": 0.3} if name == "softmax" else {}
    model = make(name, **more)
    _, calls, maps = watched(model, lengths=(33,))
    captured = Captured("model", tuple("x" * 33), tuple(range(33)), {call.layer: call for call in calls})
    layer, head = 1, 1
    image = captured.map(layer, head, resolution=33).image
    exact = maps[layer, head].numpy()
    assert np.abs(image - exact).max() <= 64 * EPS * max(1.0, np.abs(exact).max())
    small = captured.map(layer, head, ((3, 30), (2, 20)), resolution=(4, 5)).image
    spans = ((3, 30, 4), (2, 20, 5))
    rows, columns = ([begin + (end - begin) * i // n for i in range(n + 1)] for begin, end, n in spans)
    for r in range(4):
        for c in range(5):
            block = exact[rows[r] : rows[r + 1], columns[c] : columns[c + 1]].ravel()
            assert abs(small[r, c]) == pytest.approx(np.abs(block).max(), abs=64 * EPS)
    total = captured.map(layer, head, resolution=3, reduce="sum").image.sum()
    assert total == pytest.approx(exact.sum(), abs=33 * 64 * EPS)
    sparse = captured.sparse_rows(layer, head, (5, 20), above=0.01)
    whole = np.zeros((33, 33))
    whole[sparse.indices[:, 0], sparse.indices[:, 1]] = sparse.values
    kept = np.where(np.abs(exact[5:20]) > 0.01, exact[5:20], 0)
    assert np.abs(whole[5:20] - kept).max() <= 64 * EPS
    if captured.two_views(layer):
        lam = float(calls[1].own.mechanism.lam[head].detach())
        first, second = (captured.map(layer, head, resolution=33, view=view).image for view in (1, 2))
        assert np.abs(first - lam * second - exact).max() <= 64 * EPS
        panes = [pane.label for pane in Session([captured]).panes.values()]
        assert panes == ["own view 1", "own view 2", "own difference"]
        assert [pane.diverging for pane in Session([captured]).panes.values()] == [False, False, True]
    else:
        with pytest.raises(InputError, match="view"):
            captured.map(layer, head, view=1)


def test_what_if_takes_the_models_second_view():
    """TDA of the model's own parameters, spelled out, is the model itself."""
    model = make("tda")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.attention.mechanism.beta_.fill_(0.5)
    itself, _, _ = watched(model)
    spelled, _, _ = watched(model, "tda:beta=0.5,lambda=0.5,kappa=1,p=2")
    for measure in ("sparsity", "lift", "view_correlation", "g_sink_ratio_1", "max_abs_2", "sink_weight_1"):
        assert np.allclose(itself[measure], spelled[measure], rtol=1e-6, equal_nan=True)


def test_positions_are_stretched_for_a_while():
    from theory_lab.probes.positions import check_length, scaled_positions

    model = make("tda", max_positions=16)
    ids = torch.randint(3, 40, (1, 24), generator=torch.Generator().manual_seed(4))
    other = make("tda", max_positions=16, rope_ntk_factor=2.0)
    with torch.no_grad():
        before = model(ids).logits
        with scaled_positions(model, "ntk:2") as most:
            assert most == 32
            assert torch.equal(model(ids).logits, other(ids).logits)
        assert torch.equal(model(ids).logits, before)
    assert "ntk:2" in check_length(model, 24, 16)
    for scaling, one in (("yarn:2", model), ("ntk:2", make("softmax", positions="nope"))):
        with pytest.raises(InputError, match="rope-scaling"), scaled_positions(one, scaling):
            pass


def test_pairwise_weights_are_bounded(monkeypatch):
    monkeypatch.setattr(own, "MOST_KEYS", 32)
    with pytest.raises(InputError, match="pair by pair") as error:
        watched(make("lssa"))
    assert error.value.field == "length"
    watched(make("tda"))  # streams


def test_padded_texts_are_described():
    """Counts, thresholds and weights of a batch with padding on either side."""
    model = make("asentmax")
    ids = torch.randint(3, 40, (2, 12), generator=torch.Generator().manual_seed(2))
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :3], mask[1, 10:] = 0, 0
    calls = []
    with torch.no_grad():
        with watch(model, calls.append):
            model.model(ids, attention_mask=mask, use_cache=False)
        maps = model(ids, attention_mask=mask, output_attentions=True).attentions[0]
    counts = own.visible_counts(calls[0])[:, 0, :, 0]
    seen = torch.ones(12, 12).tril().bool() & mask[:, None].bool()
    assert torch.equal(counts, seen.sum(-1).clamp_min(1).double())
    ((_, block),) = own.blocks(calls[0], (0, 12), 12)
    valid = mask[:, None, :, None].bool()
    assert ((block.weights - maps).abs() * valid).max() <= 64 * EPS


# ---- the zoo ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder as training leaves it, of an untrained model."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path / "run"
    make("tda", max_positions=48).save_pretrained(folder)
    words = {"<bos>": 0, "<eos>": 1, "<pad>": 2, **{chr(97 + i): 3 + i for i in range(26)}, "?": 29}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    record = {
        "settings": {
            "attention": "tda", "attention_parameters": {}, "size": "recall", "batch": 2, "length": 48, "lr": 1e-3,
            "lr_min": 1e-4, "weight_decay": 0.1, "seed": 0,
        },
        "source": {"corpus": "letters", "sha256": "abc"}, "steps": 10, "tokens": 960, "val_loss": 3.5,
        "val_loss_se": 0.1, "held_out_tokens": 100, "device": "cpu", "seconds": 1.0, "date": "2026-01-01",
    }  # fmt: skip
    (folder / "train.json").write_text(json.dumps(record))
    return folder


@pytest.fixture
def zoo():
    import importlib.util

    place = Path(__file__).resolve().parents[2] / "tools" / "zoo.py"
    spec = importlib.util.spec_from_file_location("zoo", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_installed_model_is_found_by_name(run, zoo, tmp_path, monkeypatch):
    from click.testing import CliRunner

    from theory_lab.commands.models import command
    from theory_lab.models import catalog, list_models, load_model
    from theory_lab.probes import probe

    corpus = tmp_path / "corpus"
    corpus.mkdir()
    sources = [{"name": "letters", "license": "public domain", "tokens": 960}]
    (corpus / "manifest.json").write_text(json.dumps({"splits": {"train": {"sha256": "abc"}}, "sources": sources}))
    monkeypatch.setattr(catalog, "ZOO", tmp_path / "zoo")
    folder = zoo.install(run, "tda-tiny", corpus, tmp_path / "zoo")
    assert folder == tmp_path / "zoo" / "tda-tiny"
    assert not list((tmp_path / "zoo").glob(".*"))
    card = (folder / "README.md").read_text()
    for words in ("license: apache-2.0", "3.5000 ± 0.1000", "| letters |", "public domain", "| 0 | beta | 0.3, 0.5 |"):
        assert words in card
    assert "tda-tiny" in [model.name for model in list_models()]
    loaded = load_model("tda-tiny")
    assert loaded.folder == folder
    listed = CliRunner().invoke(command, ["list"])
    assert "tda-tiny" in listed.output
    assert "comes with Theory Lab" in listed.output
    result = probe("tda-tiny", "the quick brown fox jumps over the lazy dog again", lengths=[16, 32])
    assert {"view_correlation", "lift", "sparsity_2"} <= set(result.rows)
    weights = {name: p.dtype for name, p in tf.AutoModelForCausalLM.from_pretrained(folder).named_parameters()}
    assert {kind for name, kind in weights.items() if "mechanism" not in name} == {torch.bfloat16}


@pytest.mark.parametrize("missing", ["train.json", "tokenizer.json", "corpus"])
def test_what_is_no_finished_run_is_refused(run, zoo, tmp_path, missing):
    corpus = None
    if missing == "corpus":
        corpus = tmp_path / "corpus"
        corpus.mkdir()
        (corpus / "manifest.json").write_text(json.dumps({"splits": {"train": {"sha256": "other"}}, "sources": []}))
    else:
        (run / missing).unlink()
    with pytest.raises(InputError):
        zoo.install(run, "x", corpus, tmp_path / "zoo")
    assert not (tmp_path / "zoo" / "x").exists()
    shutil.rmtree(run)


def shipped() -> list[str]:
    from theory_lab.models import list_models

    return [model.name for model in list_models() if model.home is not None]


@pytest.mark.parametrize("name", shipped())
def test_a_model_of_the_zoo_has_learned(name):
    """It predicts a text that it never saw far better than without training, and its card belongs to it."""
    from theory_lab.models import find_model, load_model
    from theory_lab.probes.texts import shipped as texts

    loaded = load_model(name)
    ids = loaded.tokenizer(texts()[0].content[:2000], return_tensors="pt").input_ids[:, :256]
    assert ids[0, 0] == loaded.model.config.bos_token_id
    with torch.no_grad():
        loss = loaded.model(ids, labels=ids).loss
    assert float(loss) < 0.8 * np.log(loaded.model.config.vocab_size)
    folder = find_model(name).folder
    card = (folder / "README.md").read_text()
    assert f"# {name}" in card
    assert "held-out loss" in card
    assert sum(path.stat().st_size for path in folder.iterdir()) < 5_200_000
