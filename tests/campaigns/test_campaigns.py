"""Campaigns: plans are strict, slices go on, numbers are gathered with their intervals."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from theory_lab.campaigns import gather, list_plans, read_plan, run_campaign
from theory_lab.campaigns.gather import curve, mean_and_interval, scalar
from theory_lab.campaigns.plan import slug
from theory_lab.errors import InputError

PLAN = """
title = "Small"
data = "task"
seeds = [0, 3]

[train]
size = "recall"
task = "copy"
steps = 2
batch = 2
length = 16
model = { num_hidden_layers = 1 }

[measure]
tasks = ["copy"]
task_lengths = [16]
samples = 2

[runs.Softmax]
attention = "softmax"

[runs."TRA, sharp"]
attention = "tra-sharp"
seeds = [0]

[[figures]]
into = "asentmax/table-recall"
columns = { "16" = "accuracy@16" }
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(PLAN)
    return path


def test_shipped_plans_are_read() -> None:
    plans = list_plans()
    assert set(plans) >= {"ablation", "language", "recall", "retrieval", "zoo"}
    for name in plans:
        assert len({run.folder for run in read_plan(name).runs}) == len(read_plan(name).runs)


def test_seeds_take_turns(plan: Path) -> None:
    assert [(run.name, run.seed) for run in read_plan(str(plan)).runs] == [
        ("Softmax", 0), ("TRA, sharp", 0), ("Softmax", 3),
    ]  # fmt: skip
    assert slug("TRA, sharp") == "tra-sharp"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("steps = 2", "stepz = 2", "key 'train.stepz'"),
        ("steps = 2", "steps = 0", "key 'runs.Softmax'"),
        ("samples = 2", "sample = 2", "key 'measure.sample'"),
        ('attention = "tra-sharp"', 'atention = "tra-sharp"', "atention"),
        ("seeds = [0, 3]", "seeds = [-1]", "key 'seeds'"),
        ('task = "copy"', "", "a task is needed"),
        ('"TRA, sharp"', '"softmax"', "whose folder differs"),
        ('columns = { "16" = "accuracy@16" }', 'runs = ["Softmin"]', "Softmin"),
        ("columns = {", 'panels = { "Softmax" = "left" }\ncolumns = {', "each of Softmax, TRA, sharp"),
        ('title = "Small"', "title = 3", "key 'title'"),
        ("samples = 2", 'attention = "ssmax"', "one of softmax, adaptive-temperature, entmax, sparsemax"),
        ("samples = 2", 'attention = "entmax"', "key 'runs.TRA, sharp.attention': tra-sharp"),
        ('size = "recall"', 'start = "tda-pica"', "did you mean 'tda-pico'?"),
        ("accuracy@16", "accuracy(sort)@16", "one of the tasks is needed: copy"),
        ("accuracy@16", "sequence_accuracy", "a length after @ is needed in a table, of 16"),
        ("accuracy@16", "accuracy@32", "a length after @ is needed in a table, of 16"),
    ],
)
def test_a_wrong_plan_names_its_key(plan: Path, old: str, new: str, said: str) -> None:
    plan.write_text(PLAN.replace(old, new, 1))
    with pytest.raises(InputError, match=r"small\.toml") as caught:
        read_plan(str(plan))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_such_plan() -> None:
    with pytest.raises(InputError, match=r"did you mean 'language'.* known are ablation, eta-starts, language, "):
        read_plan("langage")


def test_intervals_over_seeds() -> None:
    mean, low, high = mean_and_interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert high - mean == pytest.approx(4.302652729911275 / math.sqrt(3))
    assert low + high == pytest.approx(4.0)
    assert math.isnan(mean_and_interval([1.0])[1])


def _read(path: Path) -> pd.DataFrame:
    """A file of measured numbers: comments stand before the header, and a name may hold a #."""
    lines = path.read_text().splitlines()
    return pd.read_csv(path, skiprows=sum(line.startswith("#") for line in lines))


def _result(name: str, seed: int, loss: float) -> dict[str, Any]:
    heads = [
        {"length": n, "layer": layer, "sparsity": 0.5 + 0.1 * layer, "max_abs": 1.0 + layer, "g_sink_ratio_1": loss / n}
        for n in (4, 8, 16)
        for layer in (0, 1)
    ]
    return {
        "name": name,
        "seed": seed,
        "train": {"val_loss": loss, "tokens_per_second": 5.0, "device": "cpu", "settings": {"length": 8}},
        "layers": [{"step": 1, "layer": 0, "correlation": 0.1}, {"step": 1, "layer": 1, "correlation": 0.3}],
        "measured": {
            "heads": heads,
            "loss": {"16": [1.0, 3.0]},
            "tasks": [
                {
                    "asked": "copy",
                    "length": 16,
                    "accuracy": 0.25,
                    "low": 0.2,
                    "high": 0.3,
                    "sequence_accuracy": 0.1,
                    "sequence_low": 0.0,
                    "sequence_high": 0.5,
                }
            ],
            "learned": [{"layer": 0, "theta": [1.0, 2.0]}],
            "inhibition": {"tokens": [" the", "fox", " the"], "map": [[1, 0, 0], [2, 3, 0], [4, 5, 6]]},
        },
    }


def test_values_of_a_run() -> None:
    result = _result("TDA", 0, 2.0)
    assert scalar(result, "loss") == 2.0
    assert scalar(result, "loss@16") == 2.0
    assert scalar(result, "zeros") == pytest.approx(55.0)  # percent, at 8: the longest that training saw
    assert scalar(result, "g_sink_ratio_1@16") == pytest.approx(0.125)
    assert scalar(result, "accuracy@16") == 25.0
    assert scalar(result, "accuracy@32") is None
    assert curve(result, "layer", "max_abs") == {0.0: 1.0, 1.0: 2.0}
    assert curve(result, "length", "max_abs") == {4.0: 2.0, 8.0: 2.0, 16.0: 2.0}
    assert curve(result, "step", "correlation") == {1.0: pytest.approx(0.2)}


def _answers(accuracy: float, count: int = 100) -> dict[str, Any]:
    """Two tests at two lengths, each sequence of one question."""
    from theory_lab.tasks.scoring import exact_interval

    rows = []
    for asked, share in (("passkey", accuracy), ("multi-needle:needles=2", accuracy / 2)):
        for length in (8, 16):
            low, high = exact_interval(share * count, count, 0.05)
            both = {"low": low, "high": high, "sequence_low": low, "sequence_high": high}
            rows.append({"asked": asked, "length": length, "accuracy": share, "sequence_accuracy": share, **both})
    return {"measured": {"tasks": rows}}


def test_answers_of_one_task_of_several() -> None:
    result = _answers(0.5)
    assert scalar(result, "sequence_accuracy(multi-needle:needles=2)@16") == 25.0
    assert curve(result, "length", "accuracy(passkey)") == {8.0: 50.0, 16.0: 50.0}
    assert scalar(result, "accuracy(passkey)@32") is None
    assert curve(result, "length", "accuracy(copy)") == {}
    with pytest.raises(InputError, match="one of several tasks is named, as in accuracy"):
        scalar(result, "accuracy@16")
    with pytest.raises(InputError, match="a length is needed"):
        scalar(result, "accuracy(passkey)")
    with pytest.raises(InputError, match="is by length"):
        curve(result, "layer", "accuracy(passkey)")


@pytest.mark.parametrize(
    ("shares", "ends"),
    [
        # One seed: Clopper and Pearson's for its own texts (by scipy.stats.binomtest).
        ((0.15,), (8.64543, 23.53080)),
        # All right in every text, for every seed: seeds do not differ, yet more texts might show a failure.
        ((1.0, 1.0, 1.0), (96.37833, 100.0)),
        # Seeds that differ more than texts do: Student's, within what a share can be.
        ((0.0, 0.5, 1.0), (0.0, 100.0)),
        ((0.4, 0.5, 0.6), (50.0 - 24.84138, 50.0 + 24.84138)),
    ],
)
def test_intervals_of_answers(shares: tuple[float, ...], ends: tuple[float, float]) -> None:
    from theory_lab.campaigns import answers

    found = [_answers(share) for share in shares]
    asked = answers.parse("accuracy(passkey)@16")
    assert asked is not None
    own = [share for result in found for share in answers.shares(result, asked).values()]
    values = [share.value for share in own]
    student = mean_and_interval(values)[1:]
    assert answers.interval(values, own, student) == pytest.approx(ends, abs=1e-4)


def test_gather_leaves_out_what_has_no_result_yet(plan: Path, tmp_path: Path) -> None:
    plan.write_text(plan.read_text() + '\n[[figures]]\ninto = "a/map"\nruns = ["TRA, sharp"]\nvalue = "theta"\n')
    campaign, out = read_plan(str(plan)), tmp_path / "runs"
    run = next(run for run in campaign.runs if run.name != "TRA, sharp")
    (out / run.folder).mkdir(parents=True)
    (out / run.folder / "result.json").write_text(json.dumps(_result(run.name, run.seed, 2.0)))
    gather(campaign, out, tmp_path / "into")
    assert not (tmp_path / "into/a").exists()


def test_gather_writes_what_reproduce_reads(plan: Path, tmp_path: Path) -> None:
    plan.write_text(
        PLAN.partition("[[figures]]")[0]
        + """
[[figures]]
into = "tda/table-2"
columns = { "validation loss" = "loss", "sparsity" = "zeros", "over, %" = "loss over Softmax" }

[[figures]]
into = "ours/trained-sinks"
x = "length"
value = "g_sink_ratio_1"
names = { "TRA, sharp" = "Softmax" }
panels = { "Softmax" = "softmax", "TRA, sharp" = "threshold" }

[[figures]]
into = "tda/figure-maxima"
runs = ["Softmax"]
x = "layer"
series = { "view 1" = "max_abs", "difference" = "sparsity" }

[[figures]]
into = "tda/figure-inhibition"
runs = ["Softmax"]
value = "inhibition"

[[figures]]
into = "asentmax/figure-temperatures"
value = "theta"

[[figures]]
into = "tda/figure-passkey"
x = "length"
value = "accuracy"

[[figures]]
into = "tda/table-4"
rows = { "16 tokens" = "sequence_accuracy(copy)@16" }
"""
    )
    campaign, out = read_plan(str(plan)), tmp_path / "runs"
    with pytest.raises(InputError, match="finished runs"):
        gather(campaign, out, tmp_path)
    for run, loss in zip(campaign.runs, (2.0, 5.0, 4.0), strict=True):
        folder = out / run.folder
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps(_result(run.name, run.seed, loss)))
    written = gather(campaign, out, tmp_path / "into")
    tables = {path.stem: _read(path) for path in written}
    assert (tmp_path / "into/tda/measured/table-2.csv").read_text().startswith("# device: cpu\n# seed: 0, 3\n")
    table = tables["table-2"].set_index(["row", "column"])
    assert table.value["Softmax", "validation loss"] == 3.0
    assert table.low["Softmax", "validation loss"] == pytest.approx(3.0 - 12.7062, abs=1e-3)
    assert math.isnan(table.low["TRA, sharp", "validation loss"])
    # Of the seed that both have, 5 over 2; nothing is over itself.
    assert table.value["TRA, sharp", "over, %"] == pytest.approx(150.0)
    assert ("Softmax", "over, %") not in table.index
    # Student's interval of two shares is wider than shares are.
    assert table.low["Softmax", "sparsity"] >= 0.0
    assert table.high["Softmax", "sparsity"] <= 100.0
    assert list(tables["trained-sinks"].x[:3]) == [4, 8, 16]
    # Two runs under one name, in a panel each.
    assert set(tables["trained-sinks"].series) == {"Softmax"}
    assert list(tables["trained-sinks"].panel) == ["softmax"] * 3 + ["threshold"] * 3
    assert set(tables["figure-maxima"].series) == {"view 1", "difference"}
    assert list(tables["figure-inhibition"].row) == ["the", "fox", "fox", "the#2", "the#2", "the#2"]
    assert list(tables["figure-temperatures"].value) == [1.0, 2.0]
    passkey = tables["figure-passkey"].set_index("series")
    assert (passkey.value["Softmax"], passkey.low["Softmax"], passkey.high["Softmax"]) == (25.0, 20.0, 30.0)
    assert tables["table-4"][["row", "column", "value", "low", "high"]].iloc[0].tolist() == [
        "16 tokens", "Softmax", 10.0, 0.0, 50.0,
    ]  # fmt: skip


def test_a_campaign_in_slices(plan: Path, tmp_path: Path) -> None:
    """Trains, stops at the end of a slice, goes on, does nothing twice."""
    pytest.importorskip("torch")
    campaign, out = read_plan(str(plan)), tmp_path / "runs"
    none = run_campaign(campaign, out, minutes=1e-3)
    assert (none.finished, none.remaining) == (0, 3)
    done = run_campaign(campaign, out)
    assert (done.finished, done.remaining, done.failed) == (3, 0, {})
    before = (out / "softmax/seed-0/result.json").stat().st_mtime_ns
    assert run_campaign(campaign, out).finished == 3
    assert (out / "softmax/seed-0/result.json").stat().st_mtime_ns == before
    result = json.loads((out / "tra-sharp/seed-0/result.json").read_text())
    assert result["train"]["steps"] == 2
    assert result["measured"]["tasks"][0]["length"] == 16
    (path,) = gather(campaign, out, tmp_path / "into")
    assert len(_read(path)) == 2


def test_a_mechanism_takes_the_place_of_the_trained_one() -> None:
    """The same weights under another mechanism are the model that was made with it; what is learned is not lost."""
    torch = pytest.importorskip("torch")
    from theory_lab.campaigns.measure import exchange
    from theory_lab.models.lab import LabForCausalLM, make_config
    from theory_lab.models.loading import LoadedModel

    def made(attention: str) -> LoadedModel:
        torch.manual_seed(0)
        config = make_config("recall", attention, vocab_size=40, initializer_range=0.5)
        return LoadedModel(LabForCausalLM(config).eval(), None, "untrained", 2, 2, 2, 64, None, True, folder=None)

    one, other = made("softmax"), made("adaptive-temperature")
    ids = torch.arange(30)[None] % 40
    with torch.inference_mode():
        before = one.model(input_ids=ids).logits
        exchange(one, "adaptive-temperature")
        after = one.model(input_ids=ids).logits
        assert torch.equal(after, other.model(input_ids=ids).logits)
        assert not torch.allclose(after, before, rtol=1e-3)
    assert one.model.config.attention == "adaptive-temperature"
    with pytest.raises(InputError, match="as many views as the model's"):
        exchange(made("tda"), "softmax")


def test_the_command_says_what_is_missing(plan: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the folder of a corpus is needed"):
        run_campaign(read_plan("language"), tmp_path)
    with pytest.raises(InputError, match="runs are Softmax"):
        run_campaign(read_plan(str(plan)), tmp_path, only=["TDA"])
    words = [sys.executable, "-m", "theory_lab.main", "campaign", "run", "nope", "--out", str(tmp_path / "x")]
    said = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert said.returncode == 2
    assert said.stderr.startswith("theory-lab: error: plan: nope;")
    assert not (tmp_path / "x").exists()


def test_a_place_or_device_that_is_not_there_is_refused_once(plan: Path, tmp_path: Path) -> None:
    campaign = read_plan(plan)
    with pytest.raises(InputError, match="device: cuda:99"):
        run_campaign(campaign, tmp_path / "x", devices=("cuda:99",))
    assert not (tmp_path / "x").exists()
    with pytest.raises(InputError, match=r"out: .*a folder that can be written"):
        run_campaign(campaign, plan)
