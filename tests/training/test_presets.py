"""Presets, and the command line of training."""

from __future__ import annotations

import json
from pathlib import Path

import click.testing
import pytest
from tiny_runs import TINY

from theory_lab.commands.parsing import named, pairs
from theory_lab.commands.train import command
from theory_lab.errors import InputError
from theory_lab.models.lab import make_config
from theory_lab.training import TrainSettings
from theory_lab.training.cost import flops_per_token, parameter_count
from theory_lab.training.presets import get_preset, presets

PLAIN = 'title = "t"\nsource = "s"\n[train]\n'


@pytest.mark.parametrize("name", presets())
def test_shipped_presets_are_models(name: str) -> None:
    preset = presets()[name]
    given = {"corpus": None if "task" in preset.train else ".", **preset.train}
    s = TrainSettings(**given)
    make_config(
        s.size, s.attention, vocab_size=512, attention_parameters=s.attention_parameters,
        **{"max_positions": s.length, **s.model},
    )  # fmt: skip
    assert preset.title
    assert preset.source


def test_papers_settings() -> None:
    for name in ("tda.pico", "tda.small", "tda.paper"):
        train = presets()[name].train
        assert train["attention_parameters"] == {"kappa": 1.0, "beta": 1.0, "p": 2.0}
        assert (train["lr"], train["lr_min"], train["weight_decay"]) == (1e-3, 1e-4, 0.1)
    paper = TrainSettings(corpus=".", **presets()["tda.paper"].train)
    assert paper.steps * paper.tokens_per_step == pytest.approx(10e9, rel=1e-3)


def test_cost_of_the_papers_size() -> None:
    config = make_config("paper", "softmax", vocab_size=50257, max_positions=1024)
    parameters = parameter_count(config)
    assert parameters == pytest.approx(162e6, rel=0.002)
    # 6 a weight outside the embedding, which is looked up and not multiplied, and 12 L C T of attention.
    weights = parameters - 50257 * 768
    assert flops_per_token(config, parameters, 1024) == 6 * weights + 12 * 12 * 768 * 1024
    assert flops_per_token(config, parameters, 1024, causal=True) == 6 * weights + 6 * 12 * 768 * 1024


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (PLAIN + 'attenton = "tda"\n', "did you mean 'attention'?"),
        (PLAIN + "steps = 0\n", "steps 0; a whole number of at least 1 is allowed"),
        (PLAIN + 'corpus = "/data"\n', "corpus; "),
        ('title = "t"\nsource = "s"\n', "no [train]"),
        ("[train]\nsteps = 5\n", "title"),
        (PLAIN + "note = 1\n[other]\n", "other; title, source and train are allowed"),
        ("title = \n", "not valid TOML"),
    ],
)
def test_damaged_presets_are_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        get_preset(str(path))
    assert message in str(caught.value)
    assert "mine.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_with_parameters() -> None:
    assert named("tda:beta=0.8,eps=1e-2, learnable=false", "attention") == (
        "tda",
        {"beta": 0.8, "eps": 0.01, "learnable": False},
    )
    assert pairs("positions=nape,num-hidden-layers=6", "model") == {"positions": "nape", "num_hidden_layers": 6}
    for text in ("", ":beta=1", "tda:beta", "tda:beta=", "tda:beta=1,beta=2"):
        with pytest.raises(InputError, match="attention"):
            named(text, "attention")


def typed(*words: object) -> click.testing.Result:
    found = click.testing.CliRunner().invoke(command, [str(word) for word in words], standalone_mode=False)
    if found.exception is not None:
        raise found.exception
    return found


def test_command_line_replaces_what_a_preset_says(corpus: Path, tmp_path: Path) -> None:
    model = ",".join(f"{key}={value}" for key, value in TINY.items())
    shared = (
        "--corpus",
        corpus,
        "--model",
        model,
        "--length",
        16,
        "--steps",
        2,
        "--batch",
        2,
        "--device",
        "cpu",
        "--quiet",
    )
    found = typed("--preset", "tda.pico", *shared, "--eval-batches", 1, "--out", tmp_path / "m", "--format", "json")
    record = json.loads(found.stdout)
    assert record["settings"]["attention"] == "tda"
    assert record["settings"]["attention_parameters"]["kappa"] == 1.0
    assert (record["steps"], record["settings"]["eval_every"]) == (2, 50)
    table = typed("--preset", "tda.pico", *shared, "--eval-batches", 1, "--out", tmp_path / "m").stdout
    assert "held-out loss" in table
    assert str(tmp_path) not in json.dumps(record)  # what is kept holds on any machine


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0", "--corpus", "c"], "steps: 0; "),
        (["--steps", "many", "--corpus", "c"], "steps"),
        (["--preset", "tda.smal"], "did you mean 'tda.small'?"),
        (["--attention", "tda:beta"], "key=value pairs"),
        (["--out", " ", "--corpus", "c"], "out: ''"),
        ([], "either a corpus or a task is allowed"),
    ],
)
def test_bad_words_are_one_line(words: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        typed(*words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
