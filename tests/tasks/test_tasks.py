"""Tasks: their sequences mean what they say, their answers are right, and a seed decides every bit."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from theory_lab.errors import InputError
from theory_lab.tasks import BOS, IGNORED, PAD, Source, get_task, list_tasks, open_source
from theory_lab.tasks.recall import Recall
from theory_lab.tasks.source import EVALUATION, TRAINING, below

SPECS = [
    "recall",
    "recall:queries=1,key_tokens=1,symbols=40",
    "recall:queries=3,key_tokens=3,value_tokens=2,symbols=5",
    "copy",
    "reverse:symbols=2",
    "sort",
    "local-count",
    "local-count:symbols=2,window=3",
    "two-back",
    "flip-flop",
    "flip-flop:ignore=0",
]


def lengths(task) -> list[int]:
    most = task.longest() or 130
    return sorted({task.shortest(), task.shortest() + 1, *(n for n in (63, 64, 129) if task.shortest() <= n <= most)})


@pytest.mark.parametrize("spec", SPECS)
def test_sequences_have_their_length_and_keep_to_the_vocabulary(spec):
    task = open_source(spec)
    assert isinstance(task, Source)
    for length in lengths(task):
        tokens, labels, queries = task.examples(0, 5, length)
        assert tokens.shape == labels.shape == queries.shape == (5, length)
        assert tokens.dtype == labels.dtype == np.int64
        assert (tokens[:, 0] == BOS).all()
        assert tokens.min() >= 0
        assert tokens.max() < task.vocab_size
        scored = labels != IGNORED
        assert scored[:, 1:].any(axis=1).all()
        assert not scored[:, 0].any()
        assert (labels[scored] >= 4).all()
        assert labels.max() < task.vocab_size
        np.testing.assert_array_equal(queries >= 0, scored)
        for row in queries:
            asked = np.unique(row[row >= 0])
            np.testing.assert_array_equal(asked, np.arange(len(asked)))


@pytest.mark.parametrize("spec", SPECS)
def test_a_seed_and_a_step_decide_every_bit(spec):
    task, length = open_source(spec, seed=7), lengths(open_source(spec))[-1]
    tokens, labels = task.batch(3, 6, length)
    again = get_task(task.name, 7, **task.parameters)
    np.testing.assert_array_equal(again.batch(3, 6, length), (tokens, labels))
    np.testing.assert_array_equal(open_source(task.label, 7).batch(3, 6, length), (tokens, labels))
    # Workers that take fewer rows see the first of the same ones.
    np.testing.assert_array_equal(task.batch(3, 4, length), (tokens[:4], labels[:4]))
    for other in (task.batch(4, 6, length), open_source(spec, seed=8).batch(3, 6, length)):
        assert (other[0] != tokens).any()
    assert (task.examples(3, 6, length, purpose=EVALUATION).tokens != tokens).any()
    np.testing.assert_array_equal(task.examples(3, 6, length, purpose=TRAINING).tokens, tokens)


@pytest.mark.parametrize("spec", SPECS[:3])
def test_recall_asks_for_keys_of_the_text(spec):
    task = open_source(spec)
    for length in lengths(task):
        tokens, labels, queries = task.examples(1, 20, length)
        pair, asks = task.key_tokens + task.value_tokens, length - task.queries * (task.key_tokens + task.value_tokens)
        for row, label, query in zip(tokens.tolist(), labels, queries, strict=True):
            first = asks - 1 - task.pairs(length) * pair
            known = {}
            for at in range(first, asks - 1, pair):
                key = tuple(row[at : at + task.key_tokens])
                assert key not in known, "keys are distinct"
                known[key] = row[at + task.key_tokens : at + pair]
            assert row[asks - 1] == 3
            assert len(known) == task.pairs(length)
            asked = []
            for number in range(task.queries):
                at = asks + number * pair
                asked.append(tuple(row[at : at + task.key_tokens]))
                answer = known[asked[-1]]
                np.testing.assert_array_equal(label[at + task.key_tokens : at + pair], answer)
                np.testing.assert_array_equal(query[at + task.key_tokens : at + pair], number)
                assert row[at + task.key_tokens : at + pair] == answer
            assert len(set(asked)) == task.queries
            keys, values = np.array(list(known)), np.array(list(known.values()))
            assert keys.max() < 4 + task.symbols <= values.min()


def test_recall_reaches_its_longest_text_with_every_key_in_it():
    task = Recall(queries=2, key_tokens=2, value_tokens=1, symbols=4)
    tokens = task.examples(0, 3, task.longest()).tokens
    asks = task.longest() - 6
    first = asks - 1 - 3 * 16
    for row in tokens:
        keys = {(row[at], row[at + 1]) for at in range(first, asks - 1, 3)}
        assert len(keys) == 16
    with pytest.raises(InputError, match="at most"):
        task.examples(0, 1, task.longest() + 1)


def test_recall_keys_stay_distinct_where_draws_repeat(monkeypatch):
    task = Recall(queries=2, key_tokens=1, symbols=64)
    monkeypatch.setattr(Recall, "_candidates", lambda self, pairs: pairs)  # no room for repetitions
    length = 40
    tokens = task.examples(0, 50, length).tokens
    pairs, asks = task.pairs(length), length - 4
    for row in tokens:
        keys = row[asks - 1 - 2 * pairs : asks - 1 : 2]
        assert len(set(keys.tolist())) == pairs


def test_recall_asks_for_any_pair_with_equal_chance():
    task = Recall(queries=1, key_tokens=1, symbols=256)
    length = 2 + 2 * 9
    tokens = task.examples(0, 4000, length).tokens
    place = (tokens[:, 1:17:2] == tokens[:, -2:-1]).argmax(axis=1)
    counts = np.bincount(place, minlength=8)
    assert len(counts) == 8
    assert stats.chisquare(counts).pvalue > 1e-6
    values = np.bincount(tokens[:, -1] - 4 - 256, minlength=256)
    assert stats.chisquare(values).pvalue > 1e-6


@pytest.mark.parametrize(
    ("name", "answer"),
    [("copy", lambda text: text), ("reverse", lambda text: text[::-1]), ("sort", sorted)],
)
@pytest.mark.parametrize("length", [4, 5, 33])
def test_rearrangements(name, answer, length):
    tokens, labels, queries = get_task(name, symbols=6).examples(0, 4, length)
    count = (length - 2) // 2
    for row, label, query in zip(tokens.tolist(), labels.tolist(), queries.tolist(), strict=True):
        text = row[1 : count + 1]
        assert row[count + 1] == 3
        assert row[count + 2 : 2 * count + 2] == label[count + 2 : 2 * count + 2] == list(answer(text))
        assert set(label[: count + 2]) == {IGNORED}
        assert query[count + 2 : 2 * count + 2] == list(range(count))
        if length % 2:
            assert (row[-1], label[-1]) == (PAD, IGNORED)


def test_local_count_and_two_back_tag_the_token_before():
    task = get_task("local-count", symbols=3, window=4)
    tokens, labels, _ = task.examples(0, 3, 40)
    for row, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        for at in range(1, 39):
            window = row[max(1, at - 3) : at + 1]
            assert label[at + 1] == 4 + 3 + window.count(row[at]) - 1
    tokens, labels, _ = get_task("two-back", symbols=5).examples(0, 3, 20)
    for row, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        assert label[:4] == [IGNORED] * 4
        assert [label[at + 1] for at in range(3, 19)] == [row[at - 2] for at in range(3, 19)]


@pytest.mark.parametrize("length", [5, 6, 51])
def test_flip_flop_reads_what_was_written_last(length):
    tokens, labels, _ = get_task("flip-flop", ignore=0.5).examples(0, 20, length)
    write, ignore, read = 4, 5, 6
    for row, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        start = 1 if length % 2 else 2
        assert row[start] == write
        assert row[-2] == read
        stored = None
        for at in range(start, length, 2):
            assert row[at] in (write, ignore, read)
            assert row[at + 1] in (7, 8)
            if row[at] == write:
                stored = row[at + 1]
            assert (label[at], label[at + 1]) == (IGNORED, stored if row[at] == read else IGNORED)
            if row[at] == read:
                assert row[at + 1] == stored


def test_flip_flop_instructions_have_their_probabilities():
    tokens = get_task("flip-flop", ignore=0.6).examples(0, 200, 203).tokens
    chosen = tokens[:, 1::2][:, 1:-1]
    counts = [int((chosen == kind).sum()) for kind in (4, 5, 6)]
    assert stats.chisquare(counts, np.array([0.2, 0.6, 0.2]) * chosen.size).pvalue > 1e-6


def test_below_is_uniform():
    words = np.random.Philox(key=1).random_raw(30_000)
    assert stats.chisquare(np.bincount(below(words, 7), minlength=7)).pvalue > 1e-6
    assert below(np.array([0, 2**64 - 1], dtype=np.uint64), 2**32 - 1).tolist() == [0, 2**32 - 2]


def test_every_task_says_what_it_is():
    for name in list_tasks():
        if name not in ("passkey", "multi-needle"):
            task = get_task(name)
            assert task.summary
            assert task.describe() == {"task": name, "parameters": task.parameters, "seed": 0}
            assert task.vocab_size > 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: get_task("recal"), "did you mean 'recall'"),
        (lambda: get_task("recall", query=3), "queries"),
        (lambda: get_task("recall", queries=0), "queries: 0; a whole number from 1"),
        (lambda: get_task("recall", symbols=True), "symbols: True"),
        (lambda: get_task("recall", symbols=1 << 14, key_tokens=4), "fewer than 2\\^32"),
        (lambda: get_task("flip-flop", ignore=1.0), "ignore: 1.0; a probability"),
        (lambda: get_task("recall", seed=-1), "seed: -1"),
        (lambda: get_task("recall").batch(0, 1, 20), "length: 20; task recall takes at least 26"),
        (lambda: get_task("copy").batch(-1, 1, 20), "step: -1"),
        (lambda: get_task("copy").batch(0, 0, 20), "size: 0"),
        (lambda: get_task("passkey"), "tokenizer: none"),
        (lambda: open_source("recall:queries"), "as in recall:queries=8"),
        (lambda: open_source("nothing/there"), "the folder of a corpus"),
        (lambda: open_source("corpus:nothing/there"), "manifest.json"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(InputError, match=message):
        call()
