"""Probes on Dask workers: the same bits as here, from models that are sent by name and hash."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

torch = pytest.importorskip("torch")
tf = pytest.importorskip("transformers")

from theory_lab.distributed import probing  # noqa: E402
from theory_lab.distributed.cluster import Cluster  # noqa: E402
from theory_lab.distributed.sending import kind_of, name_of  # noqa: E402
from theory_lab.distributed.work import PROBES, Done, versions  # noqa: E402
from theory_lab.errors import InputError, WorkerError  # noqa: E402
from theory_lab.probes import ProbeResult, probe  # noqa: E402
from theory_lab.probes.running import OutOfMemory, Run  # noqa: E402

WORDS = [f"w{number}" for number in range(60)]
TEXTS = [" ".join(WORDS[(start + 7 * k * k) % 60] for k in range(70)) for start in range(3)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("probed") / "model"
    words = Tokenizer(models.WordLevel({"[UNK]": 0, **{w: 1 + k for k, w in enumerate(WORDS)}}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tf.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=61, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=6
    )
    tf.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class Here:
    """Workers that are none: every job travels, and is done in this process, the last one first."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def do(self, jobs: Sequence[Any]) -> Iterator[list[Done]]:
        for job in reversed(jobs):
            arrived = pickle.loads(pickle.dumps(job))
            arrived.prepare()
            value = pickle.loads(pickle.dumps(arrived.run()))
            self.done.append(job.title)
            yield [Done(job, value, 0.0)]


def asked(model: Any, scheduler: Any = None, **more: Any) -> ProbeResult:
    return probe(model, TEXTS, lengths=[5, 33, 60], metrics=["sinks", "entropy"], scheduler=scheduler, **more)


def test_same_bits_on_workers(cluster: Cluster, model: Path) -> None:
    one = {"layers": [1], "lengths": [9, 40], "as_": "tra:beta=0.7"}
    cluster._check_versions(PROBES)
    there = probe(model, TEXTS[:1], scheduler=cluster, **one)
    pd.testing.assert_frame_equal(there.rows, probe(model, TEXTS[:1], **one).rows, check_exact=True)


def test_rows_come_in_the_order_of_the_texts_and_are_kept(model: Path, tmp_path: Path) -> None:
    """Windows that are in the folder are not sent; the folder is the same as without workers."""
    here = asked(model, out=tmp_path / "here")
    there = asked(model, Here(), out=tmp_path / "there")
    pd.testing.assert_frame_equal(there.rows, here.rows, check_exact=True)
    assert (there.notes, there.complete, there.unseen) == (here.notes, here.complete, here.unseen)
    names = sorted(path.name for path in (tmp_path / "here" / "cells").iterdir())
    assert [path.name for path in sorted((tmp_path / "there" / "cells").iterdir())] == names
    (tmp_path / "there" / "cells" / names[1]).unlink()
    again = Here()
    pd.testing.assert_frame_equal(asked(model, again, out=tmp_path / "there").rows, here.rows, check_exact=True)
    assert len(again.done) == 1


def test_positions_are_scaled_there(model: Path) -> None:
    here = asked(model, rope_scaling="linear:2")
    pd.testing.assert_frame_equal(asked(model, Here(), rope_scaling="linear:2").rows, here.rows, check_exact=True)


def test_what_does_not_fit_there_is_said_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Run._forward

    def full(self: Run, ids: Sequence[int], watched: Any, seen: Any) -> None:
        if len(ids) > 40:
            raise OutOfMemory("full")
        forward(self, ids, watched, seen)

    monkeypatch.setattr(Run, "_forward", full)
    here, there = asked(model), asked(model, Here())
    pd.testing.assert_frame_equal(there.rows, here.rows, check_exact=True)
    assert set(here.rows.length) == {5, 33}
    assert not there.complete
    assert sorted(there.notes) == sorted(here.notes)


def test_another_model_under_the_name_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = probing.pickle.dumps

    def changed(value: Any) -> bytes:
        return pack(replace(value, fingerprint="0") if isinstance(value, probing.Asked) else value)

    monkeypatch.setattr(probing.pickle, "dumps", changed)
    with pytest.raises(WorkerError, match=r"finds another model under .*model than is found here"):
        asked(model, Here())


def test_a_model_that_is_not_there_is_named(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = probing.Asked("gone", "", "float32", None, None, False, None, 1, str(tmp_path))
    with pytest.raises(WorkerError, match=r"a worker on .* cannot load gone \(.*give it the same files"):
        probing._load(gone)


def test_a_window_is_a_small_message_and_has_a_name(model: Path) -> None:
    sent: list[Any] = []

    class Look(Here):
        def do(self, jobs: Sequence[Any]) -> Iterator[list[Done]]:
            sent.extend(jobs)
            yield from super().do(jobs)

    asked(model, Look())
    assert len(sent) == 3
    assert len(pickle.dumps(sent[0])) < 3000
    assert name_of(sent[0]) == "window 0 of 60 tokens of the text 'text 1'"
    assert kind_of(sent[0]).startswith(f"probe {model}")
    assert not sent[0].here


def test_torch_counts_for_probes() -> None:
    assert versions(PROBES)["torch"] == torch.__version__
    assert "torch" not in versions()
    assert versions(PROBES)["source"] != versions()["source"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--device", "cuda", "--scheduler", "local"], "scheduler: with device cuda; workers measure on the CPU"),
        (["--scheduler", "here"], "scheduler: here; local, local:WORKERS"),
        (["--worker-memory", "2GiB"], "worker-memory: 2GiB; it needs a local scheduler"),
        (["--unrelated", "--scheduler", "local"], "scheduler: local; --unrelated does not take --scheduler"),
    ],
)
def test_what_cannot_be(words: list[str], line: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from theory_lab.cli import execute

    assert execute(["probe", str(model), *words]) == 2
    assert f"theory-lab: error: {line}" in capsys.readouterr().err


def test_a_loaded_model_stays_here(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be sent; the environment's scheduler is not for it."""
    from theory_lab.models import load_model

    loaded = load_model(model)
    with pytest.raises(InputError, match="scheduler: with a loaded model"):
        asked(loaded, "local")
    monkeypatch.setenv("THEORY_LAB_SCHEDULER", "tcp://127.0.0.1:1")
    assert asked(loaded).complete
    with pytest.raises(InputError, match="no Dask scheduler answers there"):
        asked(model)
