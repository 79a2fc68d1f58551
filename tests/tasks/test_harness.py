"""lm-evaluation-harness on a set of a dozen questions made here, against log-likelihoods computed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'theory-lab[harness]'")

import pandas as pd
import torch
import transformers as tf
from click.testing import CliRunner

from theory_lab.cli import command
from theory_lab.corpus.tokenizer import tokenizer_settings, train_tokenizer
from theory_lab.errors import InputError
from theory_lab.estimation.intervals import clopper_pearson
from theory_lab.models.loading import LoadedModel
from theory_lab.probes.texts import shipped
from theory_lab.tasks.harness import run_harness

# The harness and what it imports warn of what they will change.
pytestmark = pytest.mark.filterwarnings("ignore")

YAML = """task: a_dozen
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([shipped()[0].content[:20_000]], 300).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_bytes(tokenizer_settings(64))
    torch.manual_seed(1)
    config = tf.LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    network = tf.LlamaForCausalLM(config).eval().requires_grad_(False)
    network.lm_head.weight.mul_(20.0)  # preferences that no rounding turns
    return LoadedModel(network, tf.AutoTokenizer.from_pretrained(folder), "tiny", 2, 2, 2, 8, 64, True, Path(folder))


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    words = [word for word in shipped()[0].content.split() if word.isalpha() and len(word) > 3]
    rows = [
        {"question": " ".join(words[9 * i : 9 * i + 6]), "choices": words[9 * i + 6 : 9 * i + 9], "answer": i % 3}
        for i in range(12)
    ]
    folder = tmp_path_factory.mktemp("harness")
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    (folder / "a_dozen.yaml").write_text(YAML.format(file=file))
    return folder, rows


def likelihood(model: LoadedModel, question: str, choice: str) -> float:
    start = model.tokenizer(question)["input_ids"]
    whole = model.tokenizer(f"{question} {choice}")["input_ids"]
    logits = model.model(torch.tensor([whole])).logits[0].log_softmax(-1)
    return sum(float(logits[at - 1, whole[at]]) for at in range(len(start), len(whole)))


def test_accuracy_is_that_of_the_likelihoods(model, questions):
    folder, rows = questions
    found = run_harness(model, ["a_dozen"], include=folder, batch=4)
    (row,) = found[found.metric == "acc"].to_dict("records")
    best = [max(range(3), key=lambda k, r=r: likelihood(model, r["question"], r["choices"][k])) for r in rows]
    hits = sum(choice == r["answer"] for choice, r in zip(best, rows, strict=True))
    assert 0 < hits < 12, "the test can tell"
    assert row["value"] == pytest.approx(hits / 12)
    assert (row["low"], row["high"]) == pytest.approx(clopper_pearson(hits, 12, 0.05))
    assert (row["samples"], row["method"], row["model"]) == (12, "clopper-pearson", "tiny")


def test_the_command_takes_them_too(model, questions, tmp_path):
    folder = tmp_path / "model"
    model.model.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    words = ["evaluate", str(folder), "--harness", "a_dozen", "--harness-tasks", str(questions[0]), "--limit", "5"]
    done = CliRunner().invoke(command, [*words, "--out", str(tmp_path / "rows.csv")])
    assert done.exit_code == 0, done.output
    assert pd.read_csv(tmp_path / "rows.csv").samples.unique() == [5]
    assert "a_dozen" in done.stdout


def test_what_is_wrong_is_named(model, questions):
    for call, message in (
        (lambda: run_harness(model, []), "harness: none"),
        (lambda: run_harness(model, ["a_dozen"], include="/no/such"), "harness-tasks: /no/such"),
        (lambda: run_harness(model, ["a_dozen"], include=questions[0], limit=0), "limit: 0"),
    ):
        with pytest.raises(InputError, match=message):
            call()
