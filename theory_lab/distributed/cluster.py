"""Workers of ``dask.distributed`` as a place where tasks run: starting or finding them, and leaving them."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from theory_lab.distributed import work
from theory_lab.distributed.address import Scheduler, show_memory
from theory_lab.distributed.pace import Pace
from theory_lab.distributed.sending import Sending, cannot_load
from theory_lab.distributed.work import CELLS, Done, Job, Needs, difference, versions
from theory_lab.ending import INTERRUPTS, TERMINATIONS, deferred, ignored
from theory_lab.engine import (
    WORKER_ENVIRONMENT,
    PieceTask,
    Task,
    TaskResult,
    hidden_main,
    validate_workers,
)
from theory_lab.errors import InputError, WorkerError

if TYPE_CHECKING:
    from distributed import Client, LocalCluster

#: Seconds until a scheduler must have answered, until it must have a worker, until workers must have told their
#: versions, and until everything must be closed.
_CONNECT_SECONDS = 5.0
_FIRST_WORKER_SECONDS = 10.0
_ANSWER_SECONDS = 10.0
_CLOSE_SECONDS = 5.0
#: Workers that are asked for their versions before anything is sent.
_ASKED = 64
#: Bytes of what a scheduler says first.
_LONGEST_GREETING = 1 << 20
#: No web pages, and no profile for them; and on a busy machine a worker may take its time to start again, where Dask
#: would give up on it.
_LOCAL_CONFIG = {
    **{f"distributed.{who}.http.routes": [] for who in ("scheduler", "worker", "nanny")},
    "distributed.worker.profile.enabled": False,
    "distributed.deploy.lost-worker-timeout": "1 hour",
}


class Cluster:
    """Workers of a Dask scheduler, as a place where tasks run.

    Parameters
    ----------
    scheduler : Scheduler
        An address, or workers of this machine.
    workers : int, optional
        Workers of a local one; by default one a core.
    memory : int, optional
        Bytes that each worker of a local one may hold; by default an equal part of the machine's. A worker that
        passes it is ended and started anew.
    say : callable, optional
        Told what is worth a line.
    needs : Needs
        What must be the same here and on the workers, for what will run.

    Raises
    ------
    InputError
        If there is no scheduler, it has no worker, Dask is missing, or an option does not fit.
    WorkerError
        If versions differ between here and there.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        workers: int | None = None,
        memory: int | None = None,
        say: Callable[[str], None] | None = None,
        needs: Needs = CELLS,
    ) -> None:
        _require_dask()
        self._say = say or (lambda _: None)
        self._closing = contextlib.ExitStack()
        self._pace = Pace()
        self._local: LocalCluster | None = None
        self.address = scheduler.address or "local"
        if scheduler.address is not None:
            for field, value in (("workers", workers), ("worker-memory", memory)):
                if value is not None:
                    raise InputError(field, value, f"workers of {scheduler.address} are what they were started as")
        opening = self._closing
        try:
            opening.enter_context(_quiet_logs())
            if scheduler.address is None:
                self._client = self._start(opening, scheduler.workers or validate_workers(workers), memory)
            else:
                self._client = self._connect(opening, scheduler.address)
            self._threads = sum(self._client.nthreads().values())
            self._check_versions(needs)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def _start(self, opening: contextlib.ExitStack, workers: int, memory: int | None) -> Client:
        """A scheduler in this process, and worker processes of one thread each."""
        import dask
        from distributed import Client, LocalCluster
        from distributed.system import MEMORY_LIMIT

        # Worker processes are spawned, now and after each loss; none needs the caller's script. They listen on the
        # loopback interface, and to each other alone: keys made for this run encrypt what they say.
        opening.enter_context(hidden_main())
        environment = {**dask.config.get("distributed.nanny.pre-spawn-environ"), **WORKER_ENVIRONMENT}
        opening.enter_context(dask.config.set({**_LOCAL_CONFIG, "distributed.nanny.pre-spawn-environ": environment}))
        with deferred(*INTERRUPTS, *TERMINATIONS):
            cluster = LocalCluster(
                n_workers=workers,
                threads_per_worker=1,
                memory_limit=memory or int(MEMORY_LIMIT / workers),
                host="127.0.0.1",
                security=True,
                # Dask starts a server for web pages even without any.
                scheduler_kwargs={"dashboard": False, "dashboard_address": "127.0.0.1:0", "allowed_failures": 0},
                silence_logs=_log_level(),
                preload=["theory_lab.distributed.preload"],
            )
            opening.callback(_close, cluster)
            self._local = cluster
            client = Client(cluster, set_as_default=False, name="theory-lab")
            opening.callback(_close, client)
        return client

    def _connect(self, opening: contextlib.ExitStack, address: str) -> Client:
        """A client of the scheduler at an address, once it has a worker."""
        from distributed import Client

        try:
            _hear(address)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of versions: they are compared below
                client = Client(address, timeout=_CONNECT_SECONDS, set_as_default=False, name="theory-lab")
        except Exception as error:  # whatever listens there, or does not: refused, reset, timed out, another protocol
            raise InputError("scheduler", address, f"no Dask scheduler answers there ({_line(error)})") from None
        opening.callback(_close, client)
        try:
            client.wait_for_workers(1, timeout=_FIRST_WORKER_SECONDS)
        except TimeoutError:
            start = f"start one with: dask worker {address} --nthreads 1"
            raise InputError("scheduler", address, f"it has no workers; {start}") from None
        return client

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None and self._local is not None:
            _end_workers(self._local)
        self.close()

    def close(self) -> None:
        """Leave the scheduler; end it, and its workers, if they were started here."""
        with ignored(*INTERRUPTS, *TERMINATIONS):  # it is a matter of seconds, and half of it would leave processes
            self._closing.close()

    @property
    def workers(self) -> int:
        """Tasks that can run at a time."""
        return self._threads

    def describe(self) -> str:
        """Where tasks run, and how much memory each worker may hold."""
        found = self._client.scheduler_info(n_workers=-1)["workers"].values()
        limits = sorted({int(worker["memory_limit"] or 0) for worker in found})
        ends = dict.fromkeys((limits[0], limits[-1])) if limits else {}
        shown = " to ".join(show_memory(limit) if limit else "no limit" for limit in ends)
        memory = f", memory limit {shown} each" if shown else ""
        many = f"{len(found)} worker{'' if len(found) == 1 else 's'} of {self._threads} thread"
        return f"scheduler {self.address}: {many}{'' if self._threads == 1 else 's'} in all{memory}"

    def _check_versions(self, needs: Needs = CELLS) -> None:
        """Refuse workers of other versions now; those that come later are refused with their first batch."""
        name = f"theory-lab-versions-{uuid.uuid4().hex}"
        workers = list(self._client.nthreads())[:_ASKED]
        asked = {
            worker: self._client.submit(
                work.versions, needs, key=f"{name}-{index}", workers=[worker], allow_other_workers=False, pure=False
            )
            for index, worker in enumerate(workers)
        }
        until = time.monotonic() + _ANSWER_SECONDS  # a busy or hanging worker answers later, with its first batch
        while time.monotonic() < until and not all(future.done() for future in asked.values()):
            time.sleep(0.01)
        for worker, future in asked.items():
            if future.status == "error":
                raise cannot_load(self.address, future.exception() or WorkerError("no reason given"))
            if future.status == "finished":
                unlike = difference(versions(needs), future.result())
                if unlike is not None:
                    raise WorkerError(f"worker {worker} has {unlike}: install the same there")

    def run(self, tasks: Sequence[Task | PieceTask], deadline: float = float("inf")) -> Iterator[list[TaskResult]]:
        """Yield results as they finish, batch by batch.

        After ``deadline`` (``time.monotonic``) no further batch is sent.

        Raises
        ------
        WorkerError
            If the scheduler is lost, or all workers are for long; at the end, if a task took its worker with it each
            time: everything else is done by then.
        """
        for found in Sending(self._client, self.address, self._pace, self._say).run(tasks, deadline):
            yield [result for result in found if isinstance(result, TaskResult)]

    def do(self, jobs: Sequence[Job]) -> Iterator[list[Done]]:
        """The same for jobs of another sort; see :meth:`run`."""
        for found in Sending(self._client, self.address, self._pace, self._say).run(jobs, float("inf")):
            yield [result for result in found if isinstance(result, Done)]


def _require_dask() -> None:
    try:
        import distributed  # noqa: F401  # only whether it is there
    except ImportError:
        raise InputError(
            "scheduler", "dask.distributed is not installed", "pip install 'theory-lab[cluster]' to run on a cluster"
        ) from None


def _hear(address: str) -> None:
    """OSError unless something at a tcp:// address begins to talk, as a scheduler does: Dask would wait for ever."""
    if not address.startswith("tcp://"):
        return  # the other side of TLS talks second, and Dask waits for it no longer than asked
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS) as there:
            said = there.recv(8, socket.MSG_WAITALL)
            # A message of Dask begins with its length; as one, the first words of other servers are absurd.
            if len(said) < 8 or int.from_bytes(said, "little") > _LONGEST_GREETING:
                raise OSError("something else listens there")
    except TimeoutError:
        raise OSError(f"nothing was heard for {_CONNECT_SECONDS:g} s") from None


def _log_level() -> int:
    return logging.WARNING if os.environ.get("THEORY_LAB_DEBUG") else logging.CRITICAL + 1


@contextlib.contextmanager
def _quiet_logs() -> Iterator[None]:
    """What Dask logs about losses, its users need not see: they are made good, or end the run with a line of ours."""
    # Dask gives some of its loggers levels of their own, so that the first of the family does not decide.
    families = ("tornado", "asyncio", "distributed")
    known = {*families, *(name for name in logging.root.manager.loggerDict if name.partition(".")[0] in families)}
    loggers = [logging.getLogger(name) for name in known]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(_log_level())
    try:
        yield
        gc.collect()  # what nobody waits for any more complains when it is collected
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _close(what: Client | LocalCluster) -> None:
    """Close without waiting for what is lost already, and without a word about it."""
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        what.close(timeout=_CLOSE_SECONDS)


def _end_workers(cluster: LocalCluster) -> None:
    """Stop workers at once: their unfinished batches are not worth the seconds that Dask would wait for them."""
    for nanny in cluster.workers.values():
        nanny.auto_restart = False
        with contextlib.suppress(AttributeError, TypeError, ProcessLookupError):  # it has no process just now
            os.kill(nanny.pid, signal.SIGKILL)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
