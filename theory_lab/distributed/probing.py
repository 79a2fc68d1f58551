"""Windows of a probe on a cluster: what is sent, and what a worker does with it.

A model is sent by its name and the hash of its configuration and weights; every worker loads it once, under the same
name. This module is imported by the scheduler, too: what needs torch is packed, and opened by the workers alone.
"""

from __future__ import annotations

import os
import pickle
import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from theory_lab.distributed.work import PROBES, Needs, inside
from theory_lab.errors import InputError, TheoryLabError, WorkerError

if TYPE_CHECKING:
    from theory_lab.distributed.cluster import Cluster
    from theory_lab.probes.cells import Cell
    from theory_lab.probes.plan import Plan
    from theory_lab.probes.running import Part

#: Seconds of a token's forward pass, by parameter: two operations each, 30 billion of them a second.
_SECONDS = 2.0 / 30e9
#: Seconds that a worker may need for torch and transformers, and for a model as many times as it took here.
_IMPORTS = 20.0
_LOADING = 5.0


@dataclass(frozen=True)
class Asked:
    """What all windows of a probe share.

    Attributes
    ----------
    model : str
        As for :func:`theory_lab.models.load_model`.
    fingerprint : str
        Hash of its configuration and weights.
    dtype, attention, rope_scaling, trust_remote_code
        As for :func:`theory_lab.probes.probe`.
    plan : Plan
    threads : int
        Of torch: sums may depend on it in their last bits.
    folder : str
        Of the sender: relative names start there.
    """

    model: str
    fingerprint: str
    dtype: str
    attention: str | None
    rope_scaling: str | None
    trust_remote_code: bool
    plan: Plan
    threads: int
    folder: str


@dataclass(frozen=True)
class WindowJob:
    """One window; see :class:`theory_lab.distributed.work.Job`."""

    kind: str
    title: str
    seconds: float
    startup: float
    asked: bytes
    cell: bytes

    here = False

    @property
    def needs(self) -> Needs:
        """What must be the same on both sides."""
        return PROBES

    def prepare(self) -> None:
        """Load the model, unless it is there."""
        with _lock:
            _session_of(self.asked)

    def run(self) -> Part:
        """Measure the window."""
        with _lock:
            return _session_of(self.asked).measure(pickle.loads(self.cell))  # the sender's own bytes


class _Session:
    """A model that is loaded, and how it is measured."""

    def __init__(self, packed: bytes) -> None:
        from theory_lab.probes.running import Run, fingerprint
        from theory_lab.settings import Silent

        self.packed = packed
        self._asked: Asked = pickle.loads(packed)  # the sender's own bytes
        self._loaded = _load(self._asked)
        if fingerprint(self._loaded.model) != self._asked.fingerprint:
            what = f"finds another model under {self._asked.model} than is found here"
            raise WorkerError(f"a worker on {platform.node()} {what}")
        self._run = Run(self._loaded, self._asked.plan, None, Silent(), [])

    def measure(self, cell: Cell) -> Part:
        """One window."""
        import torch

        from theory_lab.probes.positions import scaled_positions

        torch.set_num_threads(self._asked.threads)
        with scaled_positions(self._loaded.model, self._asked.rope_scaling), self._run.watching() as seen:
            return self._run.alone(cell, seen)


_lock = threading.RLock()
_session: _Session | None = None


def _session_of(packed: bytes) -> _Session:
    """The session for that; another one's model is let go first."""
    global _session
    if _session is None or _session.packed != packed:
        _session = None
        _session = _Session(packed)
    return _session


def _load(asked: Asked) -> Any:
    from theory_lab.models import load_model

    try:
        with inside(asked.folder):
            return load_model(
                asked.model,
                dtype=asked.dtype,
                attention=asked.attention,
                trust_remote_code=asked.trust_remote_code,
            )
    except TheoryLabError as error:
        where = f"a worker on {platform.node()} cannot load {asked.model}"
        raise WorkerError(f"{where} ({error}): give it the same files under the same name") from None


def measuring(
    cluster: Cluster, asked: Asked, parameters: int, loading: float
) -> Callable[[Sequence[Cell]], Iterator[tuple[int, Part]]]:
    """What measures cells on a cluster's workers, for :meth:`theory_lab.probes.running.Run.all`.

    Parameters
    ----------
    cluster : Cluster
    asked : Asked
    parameters : int
        Of the model.
    loading : float
        Seconds that loading it took here.
    """
    from theory_lab.probes.cells import work_of

    packed = pickle.dumps(asked)

    def job(cell: Cell) -> WindowJob:
        length, window = cell.lengths[-1], cell.window
        return WindowJob(
            kind=f"probe {asked.model} {asked.fingerprint}",
            title=f"window {window.index} of {length:,} tokens of the text '{window.text}'",
            seconds=_SECONDS * parameters * work_of(cell),
            startup=_IMPORTS + _LOADING * loading,
            asked=packed,
            cell=pickle.dumps(cell),
        )

    def measure(cells: Sequence[Cell]) -> Iterator[tuple[int, Part]]:
        # Long ones first: they would leave a worker alone at the end.
        order = sorted(range(len(cells)), key=lambda index: -work_of(cells[index]))
        jobs = [job(cells[index]) for index in order]
        places = {id(made): index for made, index in zip(jobs, order, strict=True)}
        for batch in cluster.do(jobs):
            for done in batch:
                yield places[id(done.task)], done.value

    return measure


def can_be_sent(device: str, model: object) -> bool:
    """Whether workers can measure that."""
    return device == "cpu" and isinstance(model, str | os.PathLike)


def check_place(device: str, model: object) -> None:
    """InputError for what cannot be measured on workers."""
    if device != "cpu":
        raise InputError("scheduler", f"with device {device}", "workers measure on the CPU: leave one of them out")
    if not can_be_sent(device, model):
        raise InputError("scheduler", "with a loaded model", "models are sent by name: give its name or folder")
