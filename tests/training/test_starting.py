"""Starting from a trained model: one of the zoo by name, or a folder; its words stay its words."""

from __future__ import annotations

import json
from pathlib import Path

import click.testing
import pytest
import torch
from safetensors.torch import load_file

from theory_lab.commands.evaluate import command as evaluate_command
from theory_lab.commands.train import command as train_command
from theory_lab.errors import InputError
from theory_lab.models.catalog import ZOO
from theory_lab.training import TrainSettings, train
from theory_lab.training.starting import inherited, start_folder, zoo_names

#: A text of 100 tokens fits the passkey with one digit; one step of two is enough to see what is written.
SHORT = ("--length", "100", "--steps", "1", "--batch", "2", "--eval-batches", "1", "--device", "cpu", "--quiet")


@pytest.fixture(autouse=True)
def _one_thread():
    """As in the tests of the loop."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def typed(command: click.Command, *words: str) -> str:
    found = click.testing.CliRunner().invoke(command, words, standalone_mode=False)
    if found.exception is not None:
        raise found.exception
    return found.stdout


def test_a_model_of_the_zoo_learns_a_task_of_words_and_takes_it(tmp_path: Path) -> None:
    out = str(tmp_path / "finder")
    words = ("--start", "tda-pico", "--task", "passkey:digits=1", "--lr", "1e-9", "--lr-min", "1e-9", *SHORT)
    record = json.loads(typed(train_command, *words, "--out", out, "--format", "json"))
    settings = record["settings"]
    assert (settings["start"], settings["attention"], settings["size"]) == ("tda-pico", "tda", "pico")
    folders = tmp_path / "finder", ZOO / "tda-pico"
    made, begun = (json.loads((folder / "config.json").read_text()) for folder in folders)
    assert settings["attention_parameters"] == begun["attention_parameters"]
    differing = {key for key in {*made, *begun} if made.get(key) != begun.get(key)}
    assert differing <= {"dtype", "transformers_version", "nape_slope"}
    after, before = (load_file(folder / "model.safetensors") for folder in folders)
    for name, weights in before.items():
        torch.testing.assert_close(after[name], weights.float(), rtol=0, atol=1e-6)

    assert (tmp_path / "finder/tokenizer.json").read_bytes() == (ZOO / "tda-pico/tokenizer.json").read_bytes()
    words = ("--task", "passkey", "--length", "100", "--samples", "2", "--format", "json", "--quiet")
    rows = json.loads(typed(evaluate_command, out, *words))
    assert json.loads(rows[0]["parameters"]) == {"digits": 1}  # as it was trained
    # A model that was started from another is a start again.
    assert inherited({"start": out, "length": 100})["attention"] == "tda"


def test_a_corpus_surrounds_a_task_of_words_alone(corpus: Path, tiny, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="both for a task of words"):
        TrainSettings(corpus=str(corpus), task="copy")
    with pytest.raises(InputError, match="both for a task of words"):
        TrainSettings(corpus=str(corpus), task="copy + sort")
    assert TrainSettings(corpus=str(corpus), task="passkey").corpus is not None
    # Words of one tokenizer in a text of another's tokens would be nonsense.
    with pytest.raises(InputError, match="its tokenizer is not the model's"):
        train(TrainSettings(start="softmax-pico", corpus=str(corpus), task="passkey", steps=1, length=100))


def test_what_is_given_wins_over_the_start(tmp_path: Path) -> None:
    assert inherited({"steps": 3}) == {"steps": 3}
    found = inherited({"start": "tda-pico", "length": 1024, "model": {"rope_ntk_factor": 2.0}})
    assert "max_position_embeddings" not in found["model"]  # longer texts than the start's: those of the training
    assert found["model"]["rope_ntk_factor"] == 2.0
    assert found["model"]["hidden_size"] == 192
    own = inherited({"start": "tda-pico", "attention_parameters": {"eps": 1e-4}})["attention_parameters"]
    assert (own["eps"], own["kappa"]) == (1e-4, 1.0)
    assert "attention_parameters" not in inherited({"start": "tda-pico", "attention": "tra"})
    # Those of the start, also where they are not the mechanism's defaults.
    config = json.loads((ZOO / "tda-pico/config.json").read_text())
    config["attention_parameters"] |= {"eps": 0.03}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert inherited({"start": str(tmp_path)})["attention_parameters"] == config["attention_parameters"]


@pytest.mark.parametrize("start", ["tda-pica", "/nowhere", "smollm2-135m"])
def test_no_such_start_is_one_line(start: str, tmp_path: Path) -> None:
    assert "tda-pico" in zoo_names()
    with pytest.raises(InputError, match=r"or one of .*tda-pico.*is allowed") as caught:
        start_folder(start)
    assert "\n" not in str(caught.value)
    if start == "tda-pica":
        assert "did you mean 'tda-pico'" in str(caught.value)
    out = tmp_path / "m"
    with pytest.raises(InputError, match="start"):
        train(TrainSettings(start=start, task="copy", length=16, steps=1, out=str(out)))
    assert not out.exists()


def test_a_start_of_another_kind_is_one_line(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"model_type": "llama"}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(InputError, match="start: ") as caught:
            inherited({"start": str(tmp_path)})
        assert "\n" not in str(caught.value)
