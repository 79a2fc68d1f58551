"""Passkey and multi-needle: the numbers are in the text, the questions name them, the length is exact."""

from __future__ import annotations

import re

import numpy as np
import pytest

pytest.importorskip("tokenizers")

from theory_lab.corpus import Corpus  # after the check for tokenizers
from theory_lab.corpus.building import Plan, build_corpus  # after the check for tokenizers
from theory_lab.errors import InputError  # after the check for tokenizers
from theory_lab.probes.texts import shipped  # after the check for tokenizers
from theory_lab.tasks import IGNORED, Source, get_task, open_source  # after the check for tokenizers


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    for text in shipped()[:2]:
        (folder / f"{text.name}.txt").write_text(text.content[:12_000], encoding="utf-8")
    return build_corpus(folder / "out", Plan(sources=[str(folder)], vocabulary=400, validation=0.4))


@pytest.mark.parametrize("within", [False, True], ids=["sentences", "corpus"])
@pytest.mark.parametrize("spec", ["passkey", "passkey:digits=1", "multi-needle", "multi-needle:needles=4,digits=3"])
def test_the_numbers_asked_for_are_in_the_text(corpus, spec, within):
    name, _, inner = spec.partition(":")
    parameters = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", inner)}
    tokenizer = corpus.tokenizer()
    task = get_task(name, 3, tokenizer=tokenizer, corpus=corpus if within else None, **parameters)
    assert isinstance(task, Source)
    assert task.vocab_size == 400
    count = parameters.get("needles", 2 if name == "multi-needle" else 1)
    for length in (task.shortest(), task.shortest() + 1, 600):
        tokens, labels, queries = task.examples(0, 4, length)
        assert tokens.shape == (4, length)
        assert (tokens[:, 0] == 0).all()
        assert not (tokens[:, 1:] < 3).any()
        for row, label, query in zip(tokens, labels, queries, strict=True):
            scored = label != IGNORED
            np.testing.assert_array_equal(label[scored], row[scored])
            np.testing.assert_array_equal(scored, query >= 0)
            text = tokenizer.decode(row.tolist())
            ask = text.index("\n\nWhat is" if name == "passkey" else "\n\nThe number")
            answers = [tokenizer.decode(label[query == number].tolist()).strip() for number in range(count)]
            assert all(re.fullmatch(rf"[1-9]\d{{{task.digits - 1}}}", answer) for answer in answers)
            if name == "passkey":
                assert text.count(f"pass key is {answers[0]}") == 2
                assert f"mind: {answers[0]} is the pass key." in text[:ask]
            else:
                known = dict(re.findall(r"The number of the (\w+) is (\d+)\.", text[:ask]))
                asked = re.findall(r"\n\nThe number of the (\w+) is (\d+)", text[ask:])
                assert len(known) == count
                assert sorted(known.items()) == sorted(asked)
                assert [number for _, number in asked] == answers


def test_needles_lie_anywhere(corpus):
    task = get_task("passkey", tokenizer=corpus.tokenizer())
    tokenizer = corpus.tokenizer()
    places = []
    for row in task.examples(0, 60, 500).tokens:
        text = tokenizer.decode(row.tolist())
        places.append(text.index(" The pass key") / text.index("\n\nWhat"))
    # Uniform over the text between the introduction (0.06) and its end: each third has 20 of 60, 4 at least.
    assert np.histogram(places, [0, 1 / 3, 2 / 3, 1])[0].min() >= 4


def test_a_seed_decides_and_the_tokenizer_counts(corpus):
    one = get_task("passkey", 1, tokenizer=corpus.tokenizer())
    tokens, labels = one.batch(5, 3, 200)
    np.testing.assert_array_equal(get_task("passkey", 1, tokenizer=corpus.path).batch(5, 3, 200), (tokens, labels))
    np.testing.assert_array_equal(
        get_task("passkey", 1, corpus=corpus.path, tokenizer=corpus.path).batch(5, 2, 200)[0][:, 0], 0
    )
    assert (one.batch(6, 3, 200)[0] != tokens).any()
    source = open_source(f"passkey:corpus={corpus.path},digits=2")
    assert source.describe()["corpus"] == corpus.name
    assert source.batch(0, 2, 128)[0].shape == (2, 128)


def test_a_tokenizer_of_transformers_does_as_well(corpus):
    transformers = pytest.importorskip("transformers")
    shared = transformers.AutoTokenizer.from_pretrained(corpus.path)
    own = corpus.tokenizer()
    assert shared("in 1984")["input_ids"] == own.encode("in 1984").ids
    assert (shared.bos_token_id, shared.eos_token_id, shared.pad_token_id) == (0, 1, 2)
    theirs, ours = get_task("multi-needle", tokenizer=shared), get_task("multi-needle", tokenizer=own)
    np.testing.assert_array_equal(theirs.batch(0, 2, 300), ours.batch(0, 2, 300))


def test_bad_input_is_named(corpus, tmp_path):
    from theory_lab.corpus.tokenizer import train_tokenizer

    other = train_tokenizer(["some other words " * 10], 270)
    with pytest.raises(InputError, match="its tokenizer is not the model's"):
        get_task("passkey", tokenizer=other, corpus=corpus)
    with pytest.raises(InputError, match="needles: 1; a whole number from 2 to 32"):
        get_task("multi-needle", tokenizer=other, needles=1)
    with pytest.raises(InputError, match="digits: 0"):
        get_task("passkey", tokenizer=other, digits=0)
    task = get_task("passkey", tokenizer=corpus.tokenizer(), corpus=corpus)
    with pytest.raises(InputError, match="at least"):
        task.batch(0, 1, task.shortest() - 1)
    with pytest.raises(InputError, match="the validation split of"):
        task.batch(0, 1, 10**5)
    with pytest.raises(InputError, match="cannot be read"):
        get_task("passkey", tokenizer=tmp_path)
