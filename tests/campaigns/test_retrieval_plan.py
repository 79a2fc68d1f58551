"""Runs that start from a model of the zoo and learn a task of words: what the worker gives them, how they are asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("accelerate")

import torch  # after the check for torch

from theory_lab.campaigns import read_plan, work  # after the check for torch
from theory_lab.corpus import Corpus  # after the check for torch
from theory_lab.errors import InputError  # after the check for torch
from theory_lab.models.catalog import ZOO  # after the check for torch

PLAN = """
title = "Finders"
data = "corpus"

[train]
task = "passkey:digits=1 + multi-needle:digits=1"
steps = 1
batch = 2
length = 100
eval_batches = 1

[measure]
tasks = ["passkey:digits=1", "multi-needle:digits=1"]
task_lengths = [100, 600]
samples = 1

[runs.Softmax]
start = "softmax-pico"
model = { rope_ntk_factor = 2.0 }

[[figures]]
into = "tda/table-4"
rows = { "600 tokens" = "sequence_accuracy(multi-needle:digits=1)@600" }
"""


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Words of the zoo's tokenizer: 8,000 of one kind to train on, 4,000 of another to validate on."""
    import numpy as np
    from tokenizers import Tokenizer

    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((ZOO / "softmax-pico/tokenizer.json").read_bytes())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    splits = {}
    for split, text, count in (("train", " the king of the land", 8000), ("validation", " an index of a table", 4000)):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        np.resize(np.array(ids, dtype="<u2"), count).tofile(folder / f"{split}.bin")
        np.save(folder / f"{split}.documents.npy", np.zeros(1, dtype=np.int64))
        splits[split] = {"documents": 1, "tokens": count, "characters": 4 * count}
    vocabulary = {"vocab_size": tokenizer.get_vocab_size()}
    manifest = {"format": 1, "name": "words", "splits": splits, "sources": [], "tokenizer": vocabulary}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return Corpus.open(folder).path


def test_a_finder_of_the_zoo_is_taught_and_asked(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "finders.toml"
    path.write_text(PLAN)
    (run,) = read_plan(str(path)).runs
    factors: dict[int, float] = {}
    from theory_lab.tasks.base import Task

    evaluate = Task.evaluate

    def watched(self: Task, model, lengths, **more):
        for length in lengths:
            factors[length] = model.model.config.rope_ntk_factor
        return evaluate(self, model, lengths, **more)

    monkeypatch.setattr(Task, "evaluate", watched)
    work._one(run, str(tmp_path / "run"), str(corpus))
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["train"]["settings"]["attention"] == "softmax"
    assert [part["corpus"] for part in result["train"]["source"]["parts"]] == ["words", "words"]
    assert (tmp_path / "run/model/tokenizer.json").is_file()
    rows = result["measured"]["tasks"]
    assert [(row["asked"], row["length"]) for row in rows] == [
        (asked, length) for asked in ("passkey:digits=1", "multi-needle:digits=1") for length in (100, 600)
    ]
    assert json.loads(rows[0]["parameters"])["corpus"] == "words"
    # 512 positions of its own, stretched twofold in training: at 600 tokens fourfold, by the next power of two.
    assert factors == {100: 2.0, 600: 4.0}
    assert str(tmp_path) not in json.dumps(result)


def test_a_plan_of_words_wants_its_corpus_and_a_start_of_the_zoo(tmp_path: Path) -> None:
    path = tmp_path / "finders.toml"
    path.write_text(PLAN)
    with pytest.raises(InputError, match="the folder of a corpus is needed"):
        work.run_campaign(read_plan(str(path)), tmp_path / "out")
    path.write_text(PLAN.replace("softmax-pico", str(tmp_path)))
    with pytest.raises(InputError, match=r"models to start from are .*softmax-pico"):
        read_plan(str(path))
    path.write_text(PLAN.replace("passkey:digits=1 + multi-needle:digits=1", "copy", 1))
    with pytest.raises(InputError, match="both for a task of words"):
        read_plan(str(path))
