"""Scores of unrelated tokens: moments by hand, the noise family made of them, the command line."""

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from probe_cases import WORDS, tiny_llama  # noqa: E402

from theory_lab import noise  # noqa: E402
from theory_lab.errors import InputError  # noqa: E402
from theory_lab.noise import model_scores  # noqa: E402
from theory_lab.probes import Text, watch  # noqa: E402
from theory_lab.probes.unrelated import SKIPPED, unrelated_scores  # noqa: E402

TEXTS = [Text("a", WORDS * 2), Text("b", WORDS[40:] * 2), Text("c", WORDS[90:] * 2)]


def cosines(loaded, length: int) -> dict[tuple[int, int], np.ndarray]:
    """Pairs of each layer and head, by hand: the queries of each text and the keys of the one before."""
    views: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = []
    for text in TEXTS:
        seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        with watch(loaded.model, lambda call, s=seen: s.update({call.layer: (call.q, call.k)})), torch.inference_mode():
            loaded.model.base_model(torch.tensor([loaded.tokenizer(text.content)["input_ids"][:length]]))
        views.append(seen)
    found: dict[tuple[int, int], list[np.ndarray]] = {}
    i, j = np.tril_indices(length - SKIPPED, -1)
    for at, seen in enumerate(views):
        for layer in seen:
            q = torch.nn.functional.normalize(seen[layer][0][0, :, SKIPPED:].double(), dim=-1)
            k = torch.nn.functional.normalize(views[at - 1][layer][1][0, :, SKIPPED:].double(), dim=-1)
            scores = (q @ k.repeat_interleave(2, 0).transpose(-1, -2)).numpy()
            for head in range(4):
                found.setdefault((layer, head), []).append(scores[head][i, j])
    return {key: np.concatenate(parts) for key, parts in found.items()}


def test_moments_are_those_of_all_pairs():
    loaded = tiny_llama()
    result = unrelated_scores(loaded, TEXTS, length=60)
    for key, scores in cosines(loaded, 60).items():
        row = result.rows.set_index(["layer", "head"]).loc[key]
        assert row.pairs == scores.size
        assert row["mean"] == pytest.approx(scores.mean(), abs=1e-5)
        assert row.sd == pytest.approx(scores.std(), abs=1e-5)
        x = scores - scores.mean()
        t = np.array([s * t * 8**0.5 for s in (-1, 1) for t in (0.25, 0.5, 1, 1.5, 2, 3, 4, 6)])
        proxy = max(x.var(), (2 * np.log(np.exp(np.outer(t, x)).mean(-1)) / t**2).max())
        assert row.proxy == pytest.approx(proxy, rel=1e-4)
        assert row.proxy_low <= row.proxy <= row.proxy_high
        # What is drawn comes from the same pairs.
        drawn = result.samples[key[0], key[1]]
        error = scores.std() / np.sqrt(drawn.size)
        assert abs(drawn.mean() - scores.mean()) < 6 * error
        assert drawn.min() >= scores.min() - 1e-5
        assert drawn.max() <= scores.max() + 1e-5


def test_one_text_is_refused():
    with pytest.raises(InputError, match="come from two texts"):
        unrelated_scores(tiny_llama(), TEXTS[:1])


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("model:", "model:NAME"),
        ("model:x,layr=2", "layr=2"),
        ("model:x,text=a.txt", "two texts"),
        ("model:x,layer=-1", "layer=-1"),
    ],
)
def test_a_wrong_noise_specification_is_one_line(spec: str, words: str):
    with pytest.raises(InputError, match=words):
        noise.get_family(spec)


def test_a_models_scores_are_a_noise_family(monkeypatch, tmp_path):
    monkeypatch.setenv("THEORY_LAB_CACHE", str(tmp_path))
    monkeypatch.setattr(model_scores, "_digest", lambda spec: spec.name.replace("/", "_"))
    measured = []

    def measure(spec):
        measured.append(spec)
        result = unrelated_scores(tiny_llama(), TEXTS, length=spec.length, layers=[spec.layer], heads=[spec.head])
        return result.samples.astype(float).reshape(-1), result.head_dim

    monkeypatch.setattr(model_scores, "_measure", measure)
    spec = model_scores.parse_model("model:tiny,head=3,layer=1,length=60,raw")
    assert spec.name == "model:tiny,layer=1,head=3,length=60,raw"
    assert model_scores.parse_model(spec.name) == spec
    first, second = model_scores.ModelScores(spec), model_scores.ModelScores(spec)
    assert len(measured) == 1  # the second one is read
    assert first.identity == second.identity
    assert first.proxy == second.proxy > 0
    with pytest.raises(InputError, match="cosines of dimension 8"):
        first.check_head_dim(64)
    law = first.scaled(noise.Scale(1 / 8, 8))
    assert 0 < law.tail(0.0) < 1
    assert law.tail(1.0) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--length", "0"), "lengths: 0"),
        (("--text", "missing.txt"), "text: missing.txt; not found"),
        (("--as", "tda:views=twins"), "views is siblings or neighbors"),
        (("--metrics", "sink"), "metrics: sink"),
        (("--metrics", ","), "metrics: nothing"),
        (("--device", "cuda", "nowhere"), "nowhere"),
        (("--plot", "a.gif"), "plot: a.gif"),
        (("--plot", ""), "plot: ''"),
        (("",), "model: ''"),
        (("--unrelated", "--length", "64,128"), "--unrelated takes one length"),
        (("nowhere",), "model: nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_command_lines_are_refused(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("THEORY_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError) as found:
        run_probe(*words, "--quiet")
    assert message in str(found.value)
    assert capsys.readouterr().out == ""


def test_an_error_is_one_line_and_exit_code_two(tmp_path, monkeypatch, capsys):
    from theory_lab.cli import execute

    monkeypatch.chdir(tmp_path)
    assert execute(["probe", "--text", "missing.txt"]) == 2
    out, err = capsys.readouterr()
    assert err == (
        "theory-lab: error: text: missing.txt; not found: name an existing text file, or - for standard input\n"
    )
    assert out == ""


def run_probe(*words: str) -> object:
    from theory_lab.commands.probe import command

    return command.main(list(words), standalone_mode=False)


def test_the_command_probes_a_folder_and_draws(tmp_path, monkeypatch, capsys):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    monkeypatch.chdir(tmp_path)
    tiny_llama().model.save_pretrained("model")
    vocabulary = {word: index for index, word in enumerate(["[UNK]", *sorted(set(WORDS.split()))])}
    words = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained("model")
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(WORDS * 4 + name)
    shared = ("model", "--text", "a.txt", "--text", "b.txt", "--quiet")
    assert run_probe(*shared, "--length", "8:32:x2", "--out", "kept", "--plot", "pictures") == 0
    table = capsys.readouterr().out
    assert "gSinkRatio(1)" in table
    assert "t interval over texts" in table  # two texts are too few for percentiles
    assert {p.name for p in (tmp_path / "pictures").iterdir()} == {"sinks.png", "layers.png", "heads.png"}
    assert {p.name for p in (tmp_path / "kept").iterdir()} == {"cells", "manifest.json", "rows.parquet", "summary.csv"}
    run_probe(*shared, "--length", "8", "--as", "tra", "--format", "json", "--plot", "all.png")
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 2 * 2 * 4
    assert {"survivors", "g_sink_ratio_1", "dead_rows"} <= rows[0].keys()
    with pytest.raises(InputError, match="nothing to draw"):
        run_probe(*shared, "--length", "8", "--metrics", "scores", "--plot", "empty")
    assert "mean score" in capsys.readouterr().out
    assert not (tmp_path / "empty").exists()
    assert run_probe(*shared, "--unrelated", "--length", "32", "--plot", "u.png") == 0
    assert "proxy x d" in capsys.readouterr().out
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("all.png", "u.png"))
