"""The training loop: settings in, a trained model's folder out."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from theory_lab.ending import note
from theory_lab.errors import InputError, TheoryLabError
from theory_lab.settings import Progress, Silent
from theory_lab.training import checkpoints, record
from theory_lab.training.device import memory, of_the_compiler, prepare
from theory_lab.training.feed import Feed, Segment
from theory_lab.training.held_out import Held, Opened, evaluate, open_data, summarize
from theory_lab.training.logs import Logs
from theory_lab.training.settings import TrainSettings
from theory_lab.training.starting import start_folder

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from theory_lab.training.stepping import Captured, Numbers, Stepper


class Interrupted(TheoryLabError):
    """Ctrl-C or a polite kill: the step was finished, and a checkpoint written."""

    exit_code = 130


@dataclass(frozen=True)
class TrainResult:
    """A finished run.

    Attributes
    ----------
    model : LabForCausalLM
        On its device, in evaluation mode.
    record : dict
        What ``train.json`` holds; see :func:`theory_lab.training.record.make`.
    folder : Path or None
        Where the model lies.
    """

    model: Any = field(repr=False)
    record: dict[str, Any]
    folder: Path | None

    @property
    def val_loss(self) -> float:
        """Held-out loss, nats a token."""
        return self.record["val_loss"]

    @property
    def tokens_per_second(self) -> float:
        """Of training; evaluations, checkpoints and set-up left out."""
        return self.record["tokens_per_second"]


def train(settings: TrainSettings, *, progress: Progress | None = None) -> TrainResult:
    """Train a model, or continue a run that was killed.

    With the same settings and seed, on the CPU, a run that was killed at any moment and continued writes the same
    losses, to the last bit, as one that was not. Under ``torchrun`` every process works on its share of each batch.

    Parameters
    ----------
    settings : TrainSettings
    progress : Progress, optional
        Told what happens.

    Returns
    -------
    TrainResult
        That of the folder, if it holds this run, finished.

    Raises
    ------
    InputError
        For settings that cannot be used: an unknown mechanism, task, size or device, a corpus smaller than one batch, a
        model that does not fit, a folder that holds another run.
    NotFinite
        If the loss or the gradient is no number; the checkpoints before it are kept.
    StoreError
        If the folder cannot be written; the checkpoints before it are kept.
    DeviceError
        If memory runs out.
    Interrupted
        After Ctrl-C or SIGTERM.
    """
    import torch

    generator = torch.get_rng_state()
    show = progress or Silent()
    try:
        return _Run(settings, show).go()
    finally:
        show.stop()
        torch.set_rng_state(generator)


class _Run:
    """One run, from set-up to its record."""

    def __init__(self, settings: TrainSettings, show: Progress) -> None:
        self.accelerator, self.settings = prepare(settings)
        self.out = None if settings.out is None else Path(settings.out)
        self.main: bool = self.accelerator.is_main_process
        self.device = self.accelerator.device
        self.rank: int = self.accelerator.process_index
        self.world: int = self.accelerator.num_processes
        self.show = show if self.main else Silent()
        self.stop = False
        self.seconds = 0.0  # of training alone, over all parts of a run
        self.held: Held | None = None
        self.compiled: bool = self.settings.compile

    def go(self) -> TrainResult:
        """Set up, train, write."""
        import torch

        from theory_lab.models.lab import LabForCausalLM, make_config
        from theory_lab.training import cost
        from theory_lab.training.stepping import fastest_softmax, precision

        s = self.settings
        begun = None if s.start is None else start_folder(s.start)
        opened = open_data(s)
        config = make_config(
            s.size,
            s.attention,
            vocab_size=opened.source.vocab_size,
            attention_parameters=dict(s.attention_parameters),
            **{"max_positions": s.length, **s.model},
        )
        parameters = cost.parameter_count(config)
        cost.check_memory(s, config, parameters, self.device, self.world)
        identity = record.identity(s, opened.source)
        known = None if self.out is None else record.find(self.out, identity)
        if self.out is not None and self.main:
            record.claim(self.out)
        self.accelerator.wait_for_everyone()
        with memory("while the model was made"):
            torch.manual_seed(s.seed)
            model: Any = LabForCausalLM(config)
            if begun is not None:
                checkpoints.load_weights(model, checkpoints.read_weights(begun), begun, "start")
            model.to(self.device).train()
        if known is not None and known.get("finished"):
            assert self.out is not None
            checkpoints.load_weights(model, checkpoints.read_weights(self.out), self.out, "out")
            self.show.say(f"{self.out} holds this run, finished")
            return TrainResult(model.eval(), known, self.out)
        with self._signals(), precision(self.device, s.dtype), fastest_softmax(self.device):
            last, facts = self._train(model, opened, identity)
        facts |= {"parameters": parameters, **cost.describe(config, parameters, s.length, self.device, self.world)}
        assert self.held is not None
        made = record.make(s, identity, opened, self.accelerator, self.held, last, self.seconds, facts)
        model.eval()
        if self.out is not None and self.main:
            record.finish(self.out, model, opened, made)
        self.accelerator.wait_for_everyone()
        return TrainResult(model, made, self.out)

    def _train(self, model: Any, opened: Opened, identity: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        """All remaining steps; the last loss, and how they were done."""
        s = self.settings
        with memory("while the first step was made"):
            start, stepper, optimizer = self._ready(model, opened)
        logs = Logs(self.out if self.main else None, start, s.tensorboard)
        self.show.start(s.steps, start, float(s.steps - start))
        last, begun = math.nan, time.perf_counter()
        try:
            for segment in Feed(opened.source, s, start, stepper.most, self.rank, self.world):
                with memory(f"at step {segment.first + 1}"):
                    numbers = self._numbers(stepper, segment, logs, lambda step: self._again(step, model, opened))
                took = time.perf_counter() - begun
                self.seconds += took
                done, last = segment.first + segment.updates, float(numbers.losses[-1])
                rows = self._rows(segment, numbers, took)
                if done == s.steps or (s.eval_every and done % s.eval_every == 0):
                    rows = self._evaluate(model, opened, done, rows, logs)
                logs.write(rows)
                self._tell(last, segment, took)
                self._keep(done, model, optimizer, identity)
                begun = time.perf_counter()  # waiting for the next batch counts, evaluations and checkpoints do not
        finally:
            logs.close()
        return last, {"graph": stepper.most > 1, "compiled": self.compiled, "resumed_from": start or None}

    # ---- parts of the loop -----------------------------------------------------------------------

    def _ready(self, model: Any, opened: Opened) -> tuple[int, Stepper, Optimizer]:
        """Steps that are done, and what does the rest: weights and moments are those of the newest whole checkpoint."""
        import torch

        from theory_lab.training.stepping import CannotCapture, Eager, make_optimizer

        s = self.settings
        can = self.device.type == "cuda" and self.world == 1
        if s.graph and not can:
            raise InputError("graph", "true", "one process on a GPU is needed to capture a step")
        capture = can and s.graph is not False
        optimizer = make_optimizer(model, s, self.device, capture)
        start = self._continue(model, optimizer)
        # One graph or an error: a captured step whose model breaks into several was seen to train something else.
        forward: Any = torch.compile(model, dynamic=False, fullgraph=True) if s.compile else model
        if capture:
            first = Feed(opened.source, s, start, 1, self.rank, self.world).draw(start, 1)
            try:
                return start, self._captured(model, forward, optimizer, first), optimizer
            except CannotCapture as error:
                if s.graph:
                    raise InputError("graph", "true", f"{s.attention} cannot be captured: {error}") from error
                self.show.say(f"the step cannot be captured in a CUDA graph ({error}): it runs without one, slower")
        wrapped = self.accelerator.prepare(forward) if self.world > 1 else forward
        return start, Eager(model, wrapped, optimizer, s, self.accelerator), optimizer

    def _captured(self, model: Any, forward: Any, optimizer: Optimizer, first: Segment) -> Captured:
        """The captured step; without a compiler where the compiler fails, which it finds out before the capture."""
        from theory_lab.training.stepping import Captured

        try:
            return Captured(model, forward, optimizer, self.settings, first)
        except RuntimeError as error:
            if forward is model or not of_the_compiler(error):
                raise
            self.show.say(f"torch.compile failed ({' '.join(str(error).split())[:200]}): the model runs without it")
            self.compiled = False
            return Captured(model, model, optimizer, self.settings, first)

    def _continue(self, model: Any, optimizer: Optimizer) -> int:
        """Load the newest checkpoint that is whole; steps that are done."""
        if self.out is None:
            return 0
        for path in reversed(checkpoints.found(self.out)):
            try:
                state = checkpoints.read_state(path)
                checkpoints.load(path, model, optimizer)
            except (OSError, ValueError) as error:
                if isinstance(error, InputError):
                    raise
                self.show.say(f"{path} is damaged ({error}); the one before it is used")
                continue
            self.seconds = float(state.get("seconds", 0.0))
            self.show.say(f"continues after step {state['step']}")
            return state["step"]
        return 0

    def _numbers(self, stepper: Stepper, segment: Segment, logs: Logs, again: Callable[[int], str]) -> Numbers:
        from theory_lab.training.stepping import NotFinite

        try:
            return stepper.run(segment)
        except NotFinite as error:
            logs.write(self._rows(segment, error.before, math.nan))
            what = str(error) if error.step is None else f"{error}{again(error.step)}"
            kept = "" if self.out is None else f"; {checkpoints.newest(self.out)}"
            raise NotFinite(f"{what}{kept}", error.before) from None

    def _again(self, step: int, model: Any, opened: Opened) -> str:
        """Where a captured step went wrong, in words: it is repeated without a graph, from the newest checkpoint.

        A graph looks at its losses when many updates are done, and the weights are then spoiled.
        """
        from theory_lab.training.stepping import Eager, NotFinite, make_optimizer

        unnamed = "; without CUDA graphs the layer is named"
        there = [] if self.out is None else checkpoints.found(self.out)
        if not there:
            return unnamed
        self.show.say("looking for the layer: the steps since the newest checkpoint are repeated without a graph")
        optimizer = make_optimizer(model, self.settings, self.device, False)
        try:
            checkpoints.load(there[-1], model, optimizer)
        except (OSError, ValueError):
            return unnamed
        eager = Eager(model, model, optimizer, self.settings, self.accelerator)
        start = checkpoints.step_of(there[-1])
        for segment in Feed(opened.source, self.settings, start, 1, self.rank, self.world):
            try:
                eager.run(segment)
            except NotFinite as error:
                return f" (repeated without a graph from step {start}: {error})"
            if segment.first + 1 >= step:
                break
        return f" (repeated without a graph from step {start}, every number was one)"

    def _rows(self, segment: Segment, numbers: Numbers, took: float) -> list[dict[str, Any]]:
        s = self.settings
        rows = []
        for index in range(len(numbers.losses)):
            step = segment.first + index + 1
            if step % s.log_every == 0 or step == s.steps:
                rows.append(
                    {
                        "step": step,
                        "tokens": step * s.tokens_per_step,
                        "loss": float(numbers.losses[index]),
                        "lr": float(segment.rates[index]),
                        "grad_norm": float(numbers.norms[index]),
                        "seconds": round(self.seconds, 3),
                        "tokens_per_second": round(segment.updates * s.tokens_per_step / took, 1),
                    }
                )
        return rows

    def _evaluate(
        self, model: Any, opened: Opened, done: int, rows: list[dict[str, Any]], logs: Logs
    ) -> list[dict[str, Any]]:
        """Held-out loss into the row of step `done`, and what the layers do into their own table."""
        from theory_lab.training.layers import measure_layers

        with memory(f"in the evaluation after step {done}"):
            sums = evaluate(model, opened, self.settings, self.device, self.rank, self.world)
            if self.world > 1:
                sums = self.accelerator.reduce(sums, reduction="sum")
            self.held = held = summarize(sums, opened.is_task)
            if self.main:
                found = measure_layers(model, opened.held_out[0].tokens, self.settings.dtype)
                logs.write_layers({"step": done, **row} for row in found)
        values = {"val_loss": held.loss, "val_loss_se": held.error, "val_accuracy": held.accuracy}
        if rows and rows[-1]["step"] == done:
            rows[-1] |= values
        else:
            rows.append({"step": done, "tokens": done * self.settings.tokens_per_step, **values})
        return rows

    def _tell(self, loss: float, segment: Segment, took: float) -> None:
        rate = segment.updates * self.settings.tokens_per_step / took
        held = "" if self.held is None else f", held out {self.held.loss:.3f}"
        self.show.note(f"{rate:,.0f} tokens/s, loss {loss:.3f}{held}")
        self.show.advance(segment.updates, float(segment.updates))

    def _keep(self, done: int, model: Any, optimizer: Optimizer, identity: dict[str, Any]) -> None:
        """Write a checkpoint if one is due, or if the run is asked to stop."""
        s = self.settings
        stopping = self._stopping() and done < s.steps
        due = bool(s.save_steps) and done % s.save_steps == 0 and done < s.steps
        if self.out is not None and (due or stopping) and self.main:
            state = {"identity": identity, "seconds": self.seconds}
            checkpoints.save(self.out, done, model, optimizer, state, s.keep)
        if due or stopping:
            self.accelerator.wait_for_everyone()
        if stopping:
            kept = "" if self.out is None else f"; the same command continues from {self.out}"
            raise Interrupted(f"interrupted after step {done} of {s.steps}{kept}")

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Finish the step at Ctrl-C or SIGTERM; a second one stops at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask(number: int, frame: FrameType | None) -> None:
            if self.stop:
                raise KeyboardInterrupt
            self.stop = True
            note(number)

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stopping(self) -> bool:
        """Whether any process was asked to stop: all must leave at the same step."""
        if self.world == 1:
            return self.stop
        import torch

        flag = torch.tensor(float(self.stop), device=self.device)
        return bool(self.accelerator.reduce(flag, reduction="sum") > 0)


def settings_from(record_: dict[str, Any]) -> TrainSettings:
    """Settings of a finished run, as its ``train.json`` holds them, without its folder."""
    fields = {f.name for f in dataclasses.fields(TrainSettings)}
    given = {name: value for name, value in record_["settings"].items() if name in fields}
    given |= {"betas": tuple(given["betas"]), "clip": float(given["clip"]), "out": None}
    return TrainSettings(**given)
