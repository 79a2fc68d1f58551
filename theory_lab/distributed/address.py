"""What ``--scheduler`` may say: workers of this machine, or the address of a Dask scheduler."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from theory_lab.errors import InputError

#: Says where cells run when ``--scheduler`` does not.
VARIABLE = "THEORY_LAB_SCHEDULER"

_ALLOWED = "local, local:WORKERS, tcp://HOST:PORT or tls://HOST:PORT is allowed"
_ADDRESS = re.compile(r"(tcp|tls)://(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_MEMORY = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*((?:[kmgt]i?)?)b?", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

#: A worker that has imported what a cell needs holds about 180 MB; below this it would be ended before its first cell.
LEAST_MEMORY = 300 * 10**6


@dataclass(frozen=True)
class Scheduler:
    """Where cells run.

    Attributes
    ----------
    address : str or None
        Of a Dask scheduler; None starts one here, with workers of this machine.
    workers : int or None
        Of ``local:WORKERS``.
    """

    address: str | None = None
    workers: int | None = None


def parse_scheduler(text: str) -> Scheduler:
    """Parse ``local``, ``local:WORKERS``, ``tcp://HOST:PORT`` or ``tls://HOST:PORT``; InputError otherwise."""
    text = text.strip()
    kind, _, number = text.partition(":")
    if kind == "local":
        if text == "local":
            return Scheduler()
        if not (number.isascii() and number.isdigit() and 1 <= int(number) <= 4096):
            raise InputError("scheduler", text, "local:WORKERS with a whole number from 1 to 4096 is allowed")
        return Scheduler(workers=int(number))
    match = _ADDRESS.fullmatch(text)
    if match is None or not 1 <= int(match.group(3)) <= 65535:
        raise InputError("scheduler", text, _ALLOWED)
    return Scheduler(address=text)


def asked_scheduler(option: str | None) -> Scheduler | None:
    """What was typed, else what the environment says; None for neither."""
    text = option if option is not None else os.environ.get(VARIABLE) or None
    return None if text is None else parse_scheduler(text)


def parse_memory(text: str) -> int:
    """Bytes of ``4GiB``, ``500MB`` or ``2G``; InputError otherwise."""
    match = _MEMORY.fullmatch(text.strip())
    if match is None:
        raise InputError("worker-memory", text, "a size such as 2GiB or 800MB is allowed")
    size = int(float(match.group(1)) * _UNITS[match.group(2).lower()])
    if not LEAST_MEMORY <= size <= 2**50:
        raise InputError("worker-memory", text, f"at least {LEAST_MEMORY // 10**6}MB is needed for a worker to start")
    return size


def show_memory(size: float) -> str:
    """Bytes as people write them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
