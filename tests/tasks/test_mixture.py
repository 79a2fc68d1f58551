"""Tasks in turn: every sequence is that of one part, and which one is a matter of step and row alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from theory_lab.errors import InputError
from theory_lab.tasks import get_task, open_source
from theory_lab.tasks.mixture import Mixture
from theory_lab.tasks.registry import split_spec, takes_text


def test_rows_take_turns_and_fewer_are_the_first_ones():
    made = open_source("copy:symbols=8 + sort:symbols=8 + reverse:symbols=8", 4)
    assert isinstance(made, Mixture)
    assert made.vocab_size == 12
    parts = [get_task(name, 4, symbols=8) for name in ("copy", "sort", "reverse")]
    for step in range(4):
        tokens, labels = made.batch(step, 7, 21)
        own = [part.batch(step, 3, 21) for part in parts]
        met = [0, 0, 0]
        for row in range(7):
            number = (row + step) % 3
            np.testing.assert_array_equal(tokens[row], own[number][0][met[number]])
            np.testing.assert_array_equal(labels[row], own[number][1][met[number]])
            met[number] += 1
        for size in (1, 2, 5):
            np.testing.assert_array_equal(made.batch(step, size, 21)[0], tokens[:size])
    # An evaluation takes one sequence a step: the parts take turns there too.
    asked = made.examples(1, 1, 21)
    np.testing.assert_array_equal(asked.tokens, parts[1].examples(1, 1, 21).tokens)


def test_it_says_what_it_is_made_of():
    made = open_source("copy:symbols=8 + recall:symbols=16,queries=2", 1)
    assert made.label == f"copy:symbols=8 + {get_task('recall', symbols=16, queries=2).label}"
    about = json.loads(json.dumps(made.describe()))
    assert [part["task"] for part in about["parts"]] == ["copy", "recall"]
    assert made.shortest() == max(part.shortest() for part in made.parts)
    assert made.longest() == made.parts[1].longest()
    with pytest.raises(InputError, match="at least"):
        made.batch(0, 2, made.shortest() - 1)


def test_signs_within_a_name_are_no_separators():
    assert split_spec("passkey:corpus=c++/d + recall") == ["passkey:corpus=c++/d", "recall"]
    assert takes_text("recall + passkey")
    assert not takes_text("recall:queries=2")
    with pytest.raises(InputError, match="did you mean 'passkey'"):
        takes_text("recall + paskey")
    with pytest.raises(InputError, match="did you mean 'sort'"):
        open_source("copy + sorted")


def test_words_and_symbols_do_not_mix(tmp_path: Path):
    pytest.importorskip("tokenizers")
    from theory_lab.corpus.tokenizer import train_tokenizer

    file = tmp_path / "tokenizer.json"
    train_tokenizer(["some words of a text, and others " * 10], 270).save(str(file))
    with pytest.raises(InputError, match="tasks over one vocabulary"):
        open_source("copy + passkey", tokenizer=tmp_path)
    made = open_source("passkey:digits=2 + multi-needle:needles=3", tokenizer=tmp_path)
    assert made.tokenizer_file == file
    assert made.batch(0, 3, made.shortest())[0].shape == (3, made.shortest())


def test_a_model_of_several_tasks_knows_what_they_agree_in(tmp_path: Path):
    pytest.importorskip("torch")
    from theory_lab.tasks.evaluation import trained_parameters

    made = open_source("recall:queries=2,symbols=16 + copy + recall:queries=3,symbols=16")
    (tmp_path / "train.json").write_text(json.dumps({"source": made.describe()}))
    found = trained_parameters(tmp_path, "recall")
    assert found["symbols"] == 16
    assert "queries" not in found
    assert trained_parameters(tmp_path, "copy") == {"symbols": 32}
    assert trained_parameters(tmp_path, "sort") == {}
    (tmp_path / "train.json").write_text('{"source": []}')
    assert trained_parameters(tmp_path, "recall") == {}
