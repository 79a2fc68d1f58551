"""Models take tests: what is right, at which positions, in pieces and whole, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import transformers as tf  # noqa: E402  # only where it is installed

from theory_lab.cli import command  # noqa: E402  # after the check for torch
from theory_lab.errors import InputError  # noqa: E402  # after the check for torch
from theory_lab.models.lab import LabForCausalLM, make_config  # noqa: E402  # after the check for torch
from theory_lab.models.loading import LoadedModel  # noqa: E402  # after the check for torch
from theory_lab.tasks import evaluation, get_task  # noqa: E402  # after the check for torch

TASK = get_task("recall", queries=2, key_tokens=1, symbols=64)


def loaded(model, **more) -> LoadedModel:
    known = {"layers": 2, "heads": 2, "key_heads": 2, "head_dim": 8, "max_positions": None, "causal": True}
    return LoadedModel(model, None, "tiny", **{**known, **more}, folder=Path("."))


def llama(**more):
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=TASK.vocab_size, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, **more,
    )  # fmt: skip
    return tf.LlamaForCausalLM(config).eval().requires_grad_(False)


def lab(attention: str):
    torch.manual_seed(0)
    config = make_config(
        "recall", attention, vocab_size=TASK.vocab_size, hidden_size=32, num_attention_heads=2, head_dim=16,
        intermediate_size=32, max_positions=64, num_key_value_heads=2,
    )  # fmt: skip
    return LabForCausalLM(config).eval().requires_grad_(False)


class Oracle(torch.nn.Module):
    """Knows the answers of recall with keys and values of one token, and answers only those of chosen questions."""

    def __init__(self, vocabulary: int, wrong: set[int] = frozenset()) -> None:
        super().__init__()
        self.head = torch.nn.Linear(vocabulary, vocabulary, bias=False)
        torch.nn.init.eye_(self.head.weight)
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.vocabulary, self.wrong = vocabulary, wrong
        self.config = SimpleNamespace(get_text_config=lambda: None)

    base_model = property(lambda self: self)

    def get_output_embeddings(self):
        return self.head

    def get_input_embeddings(self):
        return None

    def forward(self, input_ids, use_cache=False, **_):
        states = torch.zeros(*input_ids.shape, self.vocabulary)
        for row, ids in enumerate(input_ids.tolist()):
            ask = ids.index(3) if 3 in ids else len(ids)
            known = dict(zip(ids[ask - 2 :: -2], ids[ask - 1 :: -2], strict=False))
            known = {key: value for key, value in known.items() if 4 <= key < 68}
            for question, at in enumerate(range(ask + 1, len(ids), 2)):
                answer = known[ids[at]]
                states[row, at, 4 if question in self.wrong else answer] = 9.0
        return SimpleNamespace(last_hidden_state=states, logits=states, get=lambda name: None)


def test_what_is_predicted_after_the_key_is_compared_with_the_value():
    everything = evaluation.evaluate(loaded(Oracle(TASK.vocab_size)), TASK, [20, 41], samples=9).rows
    assert everything.right.tolist() == everything.questions.tolist() == [18, 18]
    assert everything.sequences_right.tolist() == [9, 9]
    assert everything.method.unique() == ["korn-graubard of 9 sequences"]
    half = evaluation.evaluate(loaded(Oracle(TASK.vocab_size, {1})), TASK, [20], samples=9).rows.iloc[0]
    assert (half.right, half.questions, half.sequences_right, half.sequence_accuracy) == (9, 18, 0, 0.0)
    assert half.low < half.accuracy == 0.5 < half.high
    assert half.loss > everything.loss.iloc[0]


def test_how_many_are_taken_at_a_time_changes_nothing(monkeypatch):
    model = loaded(lab("tda"))
    one = evaluation.evaluate(model, TASK, [33], samples=6).rows
    monkeypatch.setattr(evaluation, "_WEIGHTS_CPU", 2 * 33 * 33)
    few = evaluation.evaluate(model, TASK, [33], samples=6, chunk=0).rows
    assert one.right.tolist() == few.right.tolist()
    assert one.loss.iloc[0] == pytest.approx(few.loss.iloc[0], rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "piece"), [("llama", 1), ("llama", 40), ("tda", 1), ("tda", 7), ("asentmax", 7), ("softmax", 40)]
)
def test_pieces_give_what_the_whole_gives(kind, piece):
    model = (llama() if kind == "llama" else lab(kind)).double()
    examples = get_task("two-back", symbols=100).examples(0, 2, 41)
    head = evaluation.Head.of(loaded(model))
    whole = evaluation.predict(loaded(model), head, examples, 41)
    parts = evaluation.predict(loaded(model), head, examples, piece)
    # Sums over at most 41 keys and 2 layers in another order: some thousand roundings of numbers of order 10.
    np.testing.assert_allclose(parts[1], whole[1], rtol=0, atol=1e4 * 10 * np.finfo(np.float64).eps)
    logits = model(torch.from_numpy(examples.tokens)).logits.log_softmax(-1)
    scored = examples.labels[:, 1:] >= 0
    direct = -logits[:, :-1].gather(-1, torch.from_numpy(examples.labels[:, 1:]).clamp(min=0)[..., None])[..., 0]
    np.testing.assert_allclose(whole[1][:, 1:][scored], direct.numpy()[scored], rtol=0, atol=1e-9)
    best = logits[:, :-1].argmax(-1).numpy()
    np.testing.assert_array_equal(whole[0][:, 1:][scored], best[scored])
    assert (whole[0][:, 1:][~scored] == -1).all()


def test_logits_are_computed_at_the_scored_positions_alone(monkeypatch):
    counted = []
    original = evaluation.Head.__call__
    monkeypatch.setattr(evaluation.Head, "check", lambda *_: None)
    monkeypatch.setattr(
        evaluation.Head, "__call__", lambda head, states: counted.append(states.shape[:2]) or original(head, states)
    )
    evaluation.evaluate(loaded(llama()), TASK, [60], samples=4)
    assert sum(rows * places for rows, places in counted) == 4 * 2


def test_what_does_not_fit_is_tried_in_halves(monkeypatch):
    model = loaded(llama())
    expected = evaluation.evaluate(model, TASK, [64], samples=5).rows
    original, tried = evaluation.predict, []

    def small(model, head, examples, piece):
        tried.append((len(examples.tokens), piece))
        if len(examples.tokens) * piece > 32:
            raise torch.OutOfMemoryError("out of memory")
        return original(model, head, examples, piece)

    monkeypatch.setattr(evaluation, "predict", small)
    found = evaluation.evaluate(model, TASK, [64], samples=5).rows
    assert tried[0] == (5, 64)
    assert found.chunk.tolist() == [16]
    assert found.right.tolist() == expected.right.tolist()

    def never(*_):
        raise MemoryError

    monkeypatch.setattr(evaluation, "predict", never)
    with pytest.raises(InputError, match="length: 64; it does not fit the memory of cpu"):
        evaluation.evaluate(model, TASK, [64], samples=5)


def test_other_errors_are_not_taken_for_a_lack_of_memory(monkeypatch):
    def broken(*_):
        raise RuntimeError("something else")

    monkeypatch.setattr(evaluation, "predict", broken)
    with pytest.raises(RuntimeError, match="something else"):
        evaluation.evaluate(loaded(llama()), TASK, [64], samples=2)


def test_predictions_that_are_no_numbers_are_wrong():
    model = llama()
    model.lm_head.weight[TASK.vocab_size - 1] = float("nan")
    result = evaluation.evaluate(loaded(model), TASK, [20], samples=3)
    assert result.rows.right.tolist() == [0]
    assert "6 predictions are not finite" in result.notes[0]


def test_long_texts_can_be_fewer():
    model = loaded(llama())
    found = evaluation.evaluate(model, TASK, [20, 40, 100], samples=6, most_tokens=90).rows
    assert found.samples.tolist() == [4, 2, 1]
    assert found.questions.tolist() == [8, 4, 2]
    all_four = evaluation.evaluate(model, TASK, [20], samples=4).rows
    assert all_four.loss[0] == pytest.approx(found.loss[0], rel=1e-6), "the first ones of the same"


def test_results_of_finished_lengths_are_told_at_once():
    seen = []
    evaluation.evaluate(loaded(llama()), TASK, [20, 30], samples=2, on_row=lambda r: seen.append(len(r.rows)))
    assert seen == [1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": lambda: get_task("recall"), "lengths": [26]}, "its vocabulary has 132 tokens"),
        ({"more": {"causal": False}}, "a causal language model"),
        ({"model": lambda: llama().model}, "a causal language model"),
        ({"lengths": [9]}, "length: 9; task recall takes at least"),
        ({"lengths": []}, "length: none"),
        ({"samples": 0}, "samples: 0"),
        ({"level": 1.5}, "level: 1.5"),
        ({"chunk": -1}, "chunk: -1"),
    ],
)
def test_what_cannot_be_taken(change, message):
    model = loaded(change.get("model", llama)(), **change.get("more", {}))
    numbers = {key: change[key] for key in ("samples", "level", "chunk") if key in change}
    with pytest.raises(InputError, match=message):
        evaluation.evaluate(model, change.get("task", lambda: TASK)(), change.get("lengths", [20]), **numbers)


def test_learned_positions_end_where_their_table_does():
    config = tf.GPT2Config(vocab_size=132, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    model = loaded(tf.GPT2LMHeadModel(config).eval(), max_positions=32)
    assert evaluation.evaluate(model, TASK, [32], samples=2).rows.questions.tolist() == [4]
    with pytest.raises(InputError, match="at most 32: the model has no position beyond"):
        evaluation.evaluate(model, TASK, [33], samples=2)
    beyond = evaluation.evaluate(loaded(llama(), max_positions=64), TASK, [70], samples=2)
    assert "above 64" in beyond.notes[0]


def test_logits_that_are_scaled_or_capped_are_the_models_own():
    common = {"vocab_size": 132, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
              "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    torch.manual_seed(0)
    examples = TASK.examples(0, 2, 40)
    for made in (
        tf.Gemma2ForCausalLM(tf.Gemma2Config(**common, head_dim=8, final_logit_softcapping=0.5)),
        tf.GraniteForCausalLM(tf.GraniteConfig(**common, logits_scaling=3.0)),
    ):
        model = loaded(made.eval())
        _, surprise = evaluation.predict(model, evaluation.Head.of(model), examples, 40)
        own = -made(torch.from_numpy(examples.tokens)).logits.log_softmax(-1)[:, :-1]
        own = own.gather(-1, torch.from_numpy(examples.labels[:, 1:]).clamp(min=0)[..., None])[..., 0].detach().numpy()
        scored = examples.labels[:, 1:] >= 0
        np.testing.assert_allclose(surprise[:, 1:][scored], own[scored], rtol=1e-5)
        evaluation.evaluate(model, TASK, [40], samples=2)

    class Other(tf.LlamaForCausalLM):
        def forward(self, *arguments, **more):
            found = super().forward(*arguments, **more)
            found.logits = found.logits * 0.5
            return found

    with pytest.raises(InputError, match="no linear map of its last states"):
        evaluation.evaluate(loaded(Other(llama().config).eval()), TASK, [40], samples=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("model") / "run"
    lab("tra").save_pretrained(place)
    (place / "train.json").write_text(json.dumps({"source": TASK.describe()}))
    return place


def test_the_command(folder, tmp_path):
    def call(*words):
        done = CliRunner().invoke(command, ["evaluate", str(folder), *map(str, words)])
        assert done.exit_code == 0, done.output
        return done

    file = tmp_path / "rows.csv"
    done = call("--task", "recall", "--length", "20:80:x2", "--samples", "5", "--out", file)
    rows = pd.read_csv(file)
    # Parameters are those of the training.
    assert json.loads(rows.parameters[0]) == TASK.parameters
    assert rows.length.tolist() == [20, 40, 80]
    assert (rows.questions == 10).all()
    assert "80" in done.stdout
    assert "clustered by sequence" in done.stdout
    again = call("--task", "recall", "--length", "40", "--samples", "5", "--format", "json", "--quiet")
    assert json.loads(again.stdout)[0]["loss"] == pytest.approx(rows.loss[1], rel=1e-9)
    one, other = (
        call("--task", "recall", "--length", "40", "--samples", "5", "--format", "json", "--quiet", *words)
        for words in (("--rope-scaling", "ntk:1"), ("--rope-scaling", "ntk:64"))
    )
    assert one.stdout.split('"seconds"')[0] == again.stdout.split('"seconds"')[0]
    assert json.loads(other.stdout)[0]["loss"] != json.loads(again.stdout)[0]["loss"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "task: none; name one of recall"),
        (("--task", "recal"), "did you mean 'recall'"),
        (("--task", "recall", "--out", "rows.txt"), "out: rows.txt; a file that ends in .json"),
        (("--task", "recall", "--out", "/proc/rows.csv"), "out: /proc/rows.csv; a file that can be written"),
        (("--task", "recall:symbols=4096"), "vocabulary"),
        (("--task", "passkey"), "a model with a tokenizer"),
        (("--task", "recall", "--corpus", "x"), "task recall takes none"),
        (("--task", "recall", "--length", "4"), "at least"),
        (("--task", "recall", "--harness", "piqa"), "one of the two is allowed"),
        (("--task", "recall", "--limit", "5"), "it goes with --harness"),
        (("--harness", "piqa", "--rope-scaling", "ntk:2"), "it goes with --task"),
        (("--task", "recall", "--rope-scaling", "ntk"), "rope-scaling: ntk; linear, dynamic, yarn, ntk with a factor"),
        (("--task", "recall", "--rope-scaling", "yarn:4"), "is that of Theory Lab's own models"),
    ],
)
def test_the_command_says_what_is_wrong_in_one_line(folder, words, message):
    done = CliRunner().invoke(command, ["evaluate", str(folder), *words, "--quiet"])
    assert isinstance(done.exception, InputError)
    assert message in str(done.exception)
