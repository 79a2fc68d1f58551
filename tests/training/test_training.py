"""The loop: what it learns, continues, shares between processes, and refuses."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_runs import TINY, losses, make_corpus

from theory_lab.errors import DeviceError, InputError, StoreError
from theory_lab.settings import Silent
from theory_lab.training import Interrupted, NotFinite, TrainSettings, checkpoints, settings_from, train
from theory_lab.training.feed import Feed
from theory_lab.training.logs import COLUMNS, LAYER_COLUMNS, Table


@pytest.fixture(autouse=True)
def _one_thread():
    """Threads that wait for each other on shared cores make tiny steps a hundred times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_loss_falls_and_the_folder_is_a_model(tiny, tmp_path: Path) -> None:
    out = tmp_path / "m"
    result = train(tiny(attention="tda", steps=60, eval_every=30, lr=3e-3, out=str(out), tensorboard=True))
    rows = Table(out / "log.csv", COLUMNS).rows()
    assert [row["step"] for row in rows] == [str(step) for step in range(1, 61)]
    first, last = (np.mean([float(row["loss"]) for row in part]) for part in (rows[:5], rows[-5:]))
    assert last < 0.8 * first
    assert rows[29]["val_loss"]
    assert not rows[30]["val_loss"]
    assert float(rows[-1]["val_loss"]) == result.val_loss == json.loads((out / "train.json").read_text())["val_loss"]
    assert int(rows[-1]["tokens"]) == 60 * 4 * 16 == result.record["tokens"]
    layers = Table(out / "layers.csv", LAYER_COLUMNS).rows()
    assert [(row["step"], row["layer"]) for row in layers] == [("30", "0"), ("30", "1"), ("60", "0"), ("60", "1")]
    for name in ("dead_rows", "dead_heads", "zeros", "beta", "lam", "correlation"):
        assert np.isfinite(float(layers[0][name])), name
    assert len(list((out / "tensorboard").iterdir())) == 1

    from transformers import AutoModelForCausalLM, AutoTokenizer

    import theory_lab.models.lab  # noqa: F401  # registers the model

    read = AutoModelForCausalLM.from_pretrained(out)
    for name, parameter in read.named_parameters():
        assert torch.equal(parameter, dict(result.model.named_parameters())[name]), name
    assert AutoTokenizer.from_pretrained(out).bos_token_id == 0
    again = settings_from(result.record)
    assert (again.attention, again.steps, again.model) == ("tda", 60, TINY)


def test_the_last_step_is_the_mean_over_all_scored_tokens(tiny) -> None:
    """The loss that is reported is the model's own on the whole batch, however the step was cut."""
    whole = train(tiny(steps=2, task="recall:queries=2,symbols=16,key_tokens=1", corpus=None, length=30))
    cut = train(tiny(steps=2, task="recall:queries=2,symbols=16,key_tokens=1", corpus=None, length=30, accumulation=4))
    assert cut.record["loss"] == pytest.approx(whole.record["loss"], rel=1e-5)
    for name, parameter in whole.model.named_parameters():
        torch.testing.assert_close(dict(cut.model.named_parameters())[name], parameter, rtol=1e-3, atol=1e-5)
    assert 0 <= whole.record["val_accuracy"] <= 1


# ---- continuing ----------------------------------------------------------------------------------


#: The parent computes on one thread, so that its children find nothing half done.
FORKS = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")


def killed(settings: TrainSettings, at: int) -> None:
    """Run in a process of its own that is killed, as by kill -9, when it draws the batch of step `at`."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGKILL
        return
    try:
        drawn = Feed.draw

        def draw(self: Feed, first: int, count: int):
            if first >= at:
                os.kill(os.getpid(), signal.SIGKILL)
            return drawn(self, first, count)

        Feed.draw = draw  # type: ignore[method-assign]
        train(settings)
    finally:
        os._exit(1)


@FORKS
def test_killed_run_continues_to_the_last_bit(tiny, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    train(tiny(attention="tda", steps=8, eval_every=3, save_every=2, out=str(whole)))
    expected = losses(whole)
    assert len({loss for _, loss, _, _ in expected}) == 8
    for at in range(1, 8):
        cut = tmp_path / f"cut-{at}"
        killed(tiny(attention="tda", steps=8, eval_every=3, save_every=2, out=str(cut)), at)
        assert not (cut / "train.json").exists()
        result = train(tiny(attention="tda", steps=8, eval_every=3, save_every=2, out=str(cut)))
        assert losses(cut) == expected, at
        assert (cut / "layers.csv").read_text() == (whole / "layers.csv").read_text()
        assert result.record["resumed_from"] in (None, 2, 4, 6)
    assert (cut / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_damaged_checkpoint_is_passed_over(tiny, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(tiny(save_every=2, out=str(whole)))
    train(tiny(save_every=2, out=str(cut)))
    (cut / "train.json").unlink()
    newest = checkpoints.found(cut)[-1]
    (newest / "optimizer.safetensors").write_bytes((newest / "optimizer.safetensors").read_bytes()[:100])
    said: list[str] = []

    class Listening(Silent):
        def say(self, message: str) -> None:
            said.append(message)

    result = train(tiny(save_every=2, out=str(cut)), progress=Listening())
    assert result.record["resumed_from"] == 2
    assert "step-00000004 is damaged" in said[0]
    assert losses(cut) == losses(whole)


def test_finished_run_is_not_done_again(tiny, tmp_path: Path) -> None:
    first = train(tiny(out=str(tmp_path / "m")))
    before = (tmp_path / "m" / "model.safetensors").stat().st_mtime_ns
    again = train(tiny(out=str(tmp_path / "m")))
    assert again.record == json.loads(json.dumps(first.record))
    assert (tmp_path / "m" / "model.safetensors").stat().st_mtime_ns == before


def test_interrupted_run_finishes_its_step_and_continues(tiny, tmp_path: Path) -> None:
    class Impatient(Silent):
        def advance(self, finished: int, work: float) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    out = str(tmp_path / "m")
    with pytest.raises(Interrupted, match="after step 1 of 6; the same command continues"):
        train(tiny(out=out, save_every=0), progress=Impatient())
    assert train(tiny(out=out, save_every=0)).record["resumed_from"] == 1
    train(tiny(out=str(tmp_path / "whole")))
    assert losses(tmp_path / "m") == losses(tmp_path / "whole")


@FORKS
def test_two_processes_compute_what_one_does(tiny, tmp_path: Path) -> None:
    """Two processes over gloo, with the variables that torchrun sets."""
    shared = {"attention": "tda", "accumulation": 2, "batch": 8, "steps": 4, "eval_every": 2, "save_every": 3}
    train(tiny(**shared, out=str(tmp_path / "one")))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(2):
        child = os.fork()
        if not child:
            try:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
                signal.alarm(100)
                result = train(tiny(**shared, out=str(tmp_path / "two")))
                os._exit(0 if result.record["processes"] == 2 else 3)
            except BaseException:
                traceback.print_exc()  # pytest shows it
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    alone, together = (np.array([row[1:3] for row in losses(tmp_path / name)], dtype=float) for name in ("one", "two"))
    assert len(together) == 4
    np.testing.assert_allclose(together, alone, rtol=1e-4)  # sums in another order, over 4 steps
    ends = [[float(v) for _, _, _, v in losses(tmp_path / name) if v] for name in ("one", "two")]
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-4)
    assert len(ends[1]) == 2


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps: 0; a whole number of at least 1 is allowed"),
        ({"batch": 0}, "batch: 0; "),
        ({"length": 1}, "length: 1; "),
        ({"accumulation": 3}, "accumulation: 3; a divisor of the batch of 4 is allowed"),
        ({"lr": 0.0}, "lr: 0.0; a number above 0 is allowed"),
        ({"lr_min": 1.0}, "lr-min: 1.0; "),
        ({"betas": (0.9, 1.0)}, "betas: 1.0; "),
        ({"dtype": "float8"}, "dtype: float8; "),
        ({"warmup": 6}, "warmup: 6; fewer than the 6 steps are allowed"),
        ({"corpus": None}, "corpus: neither; "),
        ({"task": "copy"}, "corpus: both; "),
        ({"attention": "tdaa"}, "did you mean 'tda'?"),
        ({"attention": "tda", "attention_parameters": {"betta": 1}}, "did you mean 'beta'?"),
        ({"size": "pica"}, "did you mean 'pico'?"),
        ({"model": {"hidden": 64}}, "hidden"),
        ({"task": "recal", "corpus": None}, "did you mean 'recall'?"),
        ({"device": "gpu"}, "device: gpu; "),
        ({"graph": True}, "one process on a GPU is needed"),
        ({"corpus": "/nowhere"}, "manifest.json"),
        ({"start": "/nowhere"}, "start: /nowhere; "),
    ],
)
def test_bad_settings_are_one_line(tiny, tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(InputError) as caught:
        train(tiny(**changes, out=str(tmp_path / "m")))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "m" / "log.csv").exists()


def test_corpus_smaller_than_one_batch(tiny, tmp_path: Path) -> None:
    make_corpus(tmp_path, 100)
    with pytest.raises(InputError, match=r"it has 90 tokens to train on; at least one batch of 8 x 16 = 128"):
        train(tiny(corpus=str(tmp_path), batch=8))


def test_model_that_does_not_fit_memory(tiny) -> None:
    huge = {**TINY, "hidden_size": 1 << 17, "num_attention_heads": 1 << 11}
    with pytest.raises(
        InputError, match=r"size: pico; training needs at least [\d.]+ GiB .* a smaller size is allowed"
    ):
        train(tiny(model=huge))
    with pytest.raises(InputError, match=r"batch: 33554432; training needs at least .* a smaller batch"):
        train(tiny(batch=1 << 25, corpus=None, task="copy"))


def test_memory_that_runs_out_is_one_line(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from theory_lab.training import stepping

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(stepping.Eager, "_update", full)
    with pytest.raises(DeviceError, match="out of memory at step 1: a smaller batch, a larger accumulation"):
        train(tiny())


def test_folder_of_another_run(tiny, tmp_path: Path) -> None:
    out = str(tmp_path / "m")
    train(tiny(out=out))
    for changes, word in (
        ({"attention": "tra"}, 'attention "softmax"'),
        ({"steps": 7}, "steps 6"),
        ({"seed": 1}, "seed 0"),
    ):
        with pytest.raises(InputError, match=f"it holds a run with {word}, and this one has"):
            train(tiny(out=out, **changes))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("mine")
    with pytest.raises(InputError, match=r"it holds thesis\.tex"):
        train(tiny(out=str(tmp_path / "other")))


def test_start_from_another_architecture_or_vocabulary(tiny, tmp_path: Path) -> None:
    train(tiny(out=str(tmp_path / "m"), steps=1))
    start = str(tmp_path / "m")
    with pytest.raises(InputError, match=r"start: .* another architecture: it has no .*beta_"):
        train(tiny(attention="tra", start=start))
    make_corpus(tmp_path / "c", 60_000, vocabulary=80) if (tmp_path / "c").mkdir() is None else None
    with pytest.raises(
        InputError,
        match=r"another size or vocabulary: model.embed_tokens.weight is \(64, 64\) there and \(80, 64\) here",
    ):
        train(tiny(corpus=str(tmp_path / "c"), start=start))
    begun = train(tiny(start=start, steps=1, lr=1e-9, lr_min=1e-9))
    assert begun.val_loss == pytest.approx(train(tiny(steps=1)).val_loss, rel=1e-4)


def test_loss_that_is_no_number_stops_and_keeps_the_last_checkpoint(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from theory_lab.training import stepping

    out = tmp_path / "m"
    models: list[torch.nn.Module] = []
    make = stepping.make_optimizer

    def remember(model: torch.nn.Module, *rest: object):
        models.append(model)
        return make(model, *rest)

    class Poison(Silent):
        """Breaks a weight after step 5, as a fault of the device would."""

        done = 0

        def advance(self, finished: int, work: float) -> None:
            self.done += finished
            if self.done == 5:
                with torch.no_grad():
                    dict(models[0].named_parameters())["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")

    monkeypatch.setattr(stepping, "make_optimizer", remember)
    with pytest.raises(NotFinite) as caught:
        train(tiny(save_every=2, out=str(out)), progress=Poison())
    assert str(caught.value) == (
        "loss: nan at step 6, in the weights of model.layers.1.mlp.down_proj.weight; "
        "the checkpoint after step 4 is kept"
    )
    assert [row[0] for row in losses(out)] == ["1", "2", "3", "4", "5"]
    assert not (out / "model.safetensors").exists()


def test_captured_step_that_goes_wrong_is_repeated_to_name_its_layer(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stepper that sees its losses too late, as a CUDA graph does: several updates, then NaN in all weights."""
    from theory_lab.training import stepping

    class Late(stepping.Eager):
        def run(self, segment):
            if segment.first + segment.updates < 5:
                return super().run(segment)
            with torch.no_grad():
                for parameter in self._model.parameters():
                    parameter.fill_(float("nan"))
            raise NotFinite("loss: nan at step 5", stepping.Numbers(np.zeros(0), np.zeros(0)), 5)

    plain = stepping.Eager

    def first(model, *rest):
        monkeypatch.setattr(stepping, "Eager", plain)
        return Late(model, *rest)

    monkeypatch.setattr(stepping, "Eager", first)
    with pytest.raises(NotFinite) as caught:
        train(tiny(save_every=2, out=str(tmp_path / "fine")))
    assert str(caught.value) == (
        "loss: nan at step 5 (repeated without a graph from step 4, every number was one); "
        "the checkpoint after step 4 is kept"
    )

    # A fault that is there again when the step is repeated is named.
    class Broken(plain):
        def run(self, segment):
            if segment.first == 4:
                with torch.no_grad():
                    dict(self._model.named_parameters())["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
            return super().run(segment)

    plain = Broken
    monkeypatch.setattr(stepping, "Eager", first)
    with pytest.raises(NotFinite) as caught:
        train(tiny(save_every=2, out=str(tmp_path / "broken")))
    assert str(caught.value) == (
        "loss: nan at step 5 (repeated without a graph from step 4: loss: nan at step 5, in the weights of "
        "model.layers.1.mlp.down_proj.weight); the checkpoint after step 4 is kept"
    )

    # Without a checkpoint there is nothing to repeat it from.
    monkeypatch.setattr(stepping, "Eager", first)
    with pytest.raises(NotFinite, match=r"loss: nan at step 5; without CUDA graphs the layer is named$"):
        train(tiny(save_every=0))


def test_gradient_that_is_no_number(tiny) -> None:
    with pytest.raises(NotFinite, match=r"(loss|gradient norm): (nan|inf) at step \d+"):
        train(tiny(lr=1e30, lr_min=1e30, clip=float("inf"), warmup=0, weight_decay=0.0))


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_full_disk_keeps_the_checkpoint_before(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    import safetensors.torch

    out = tmp_path / "m"
    written: list[Path] = []
    save, text = safetensors.torch.save_file, Path.write_text

    def count(path: Path) -> None:
        if Path(path).name == file:
            written.append(path)
            if len(written) == 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def save_file(tensors: dict, path: Path, metadata: dict | None = None) -> None:
        count(path)
        save(tensors, path, metadata)

    def write_text(self: Path, *args: object, **more: object) -> int:
        count(self)
        return text(self, *args, **more)

    monkeypatch.setattr(safetensors.torch, "save_file", save_file)
    monkeypatch.setattr(Path, "write_text", write_text)
    with pytest.raises(StoreError, match=r"No space left on device.*the checkpoint after step 2 is kept"):
        train(tiny(save_every=2, out=str(out)))
    assert [checkpoints.step_of(path) for path in checkpoints.found(out)] == [2]
    assert not list((out / "checkpoints").glob(".*"))
    monkeypatch.undo()
    assert train(tiny(save_every=2, out=str(out))).record["resumed_from"] == 2


def test_batches_are_shared_and_cut_without_loss(tiny, corpus: Path) -> None:
    from theory_lab.corpus import Corpus

    settings = tiny(batch=12, accumulation=3)
    source = Corpus.open(corpus).source("train", 0)
    tokens, _ = source.batch(5, 12, 16)
    parts = [Feed(source, settings, 0, 1, rank, 2).draw(5, 1) for rank in (0, 1)]
    together = np.concatenate([part.tokens[0] for part in parts], axis=1).reshape(12, 16)
    np.testing.assert_array_equal(together, tokens)
    assert sum(part.shares.sum() for part in parts) == pytest.approx(1.0)
    plan = [(s.first, s.updates) for s in Feed(source, tiny(steps=10, eval_every=4, save_every=3), 1, 32, 0, 1)]
    assert plan == [(1, 2), (3, 1), (4, 2), (6, 2), (8, 1), (9, 1)]


def test_learning_rate_warms_up_and_falls_along_a_cosine() -> None:
    s = TrainSettings(corpus=".", steps=101, warmup=10, lr=1e-3, lr_min=1e-4)
    rates = [s.learning_rate(step) for step in range(101)]
    assert np.argmax(rates) == 10
    assert max(rates) == 1e-3
    assert rates[-1] == pytest.approx(1e-4)
    assert rates[55] == pytest.approx((1e-3 + 1e-4) / 2)
    assert all(np.diff(rates[:11]) > 0)
    assert all(np.diff(rates[10:]) < 0)
