"""How a process ends before its time: signals of a batch system or a terminal, and parents that are gone.

SIGTERM and SIGHUP are handled as Ctrl-C is: what is finished is kept, one line says so, and no worker stays behind. The
exit code is 128 and the signal's number, as a shell has it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType


def _there(*names: str) -> tuple[signal.Signals, ...]:
    """Signals that this system has."""
    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))


#: What a terminal sends to everything that was started from it: Ctrl-C, and that it is closed.
INTERRUPTS = _there("SIGINT", "SIGHUP")
#: Sent by batch systems, service managers and ``kill``; and when a terminal or a connection is closed.
TERMINATIONS = _there("SIGTERM", "SIGHUP")
_received: int | None = None


class Terminated(KeyboardInterrupt):
    """A signal asked the process to end."""


def handle_termination() -> None:
    """From now on, the first SIGTERM or SIGHUP raises :class:`Terminated` in the main thread.

    Further ones change nothing: what is finished is being written. One that the process was told to ignore (nohup) it
    goes on ignoring.
    """
    for number in TERMINATIONS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    if _received is None:
        note(number)
        raise Terminated


def note(number: int) -> None:
    """Whoever handles a signal by itself says which it was."""
    global _received
    if number != signal.SIGINT:
        _received = number


def exit_code(interrupted: int) -> int:
    """That of the signal that ended the process, else ``interrupted``."""
    return interrupted if _received is None else 128 + _received


@contextlib.contextmanager
def ignored(*numbers: signal.Signals) -> Iterator[None]:
    """Processes started here inherit that these are ignored: none prints a traceback before its initializer has run."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in set(numbers)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def deferred(*numbers: signal.Signals) -> Iterator[None]:
    """Signals that arrive meanwhile take effect at the end of the block, unless it fails by itself.

    For starting processes from threads of a library, over seconds: as with :func:`ignored` none of them dies of a
    signal before it has made up its mind, since they inherit that these are blocked; here none is lost either.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker  # not for every command

    chosen = set(numbers)
    came: list[int] = []
    # Threads that were here before do not block signals, and may be the ones to receive them.
    before = {number: signal.signal(number, lambda received, _: came.append(received)) for number in chosen}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, chosen)
    try:
        # multiprocessing starts it with the first process, and unblocks signals in the thread that does so: in this one
        # now, and not later in another.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, chosen)
        yield
        came += signal.sigpending() & chosen
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # what is pending is received now
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])


def begin_worker() -> None:
    """What a worker process does first: it leaves Ctrl-C to its parent, and ends with it."""
    # They reach the whole process group; the parent decides what becomes of the workers.
    for number in INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that is killed cannot end its workers, which would wait for tasks for ever."""
    from multiprocessing import parent_process  # not for every command

    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
