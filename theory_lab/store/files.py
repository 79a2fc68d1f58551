"""Files that appear whole or not at all, and the lock that writers of one folder share."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from theory_lab.errors import InputError, StoreError

#: How long a writer waits for another process before it gives up, in seconds.
PATIENCE = 300.0


def refuse_links(folder: Path, field: str) -> None:
    """Refuse a results folder that has links, pipes or devices in it: it may be another's, and lead anywhere.

    What is appended to a link goes where it leads, and a device is read for ever. The folder itself may be a link.

    Raises
    ------
    InputError
        The message names the entry.
    """
    for place in (folder, folder / "cells", folder / "packs"):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(place) as entries:
            for entry in entries:
                if not entry.is_file(follow_symlinks=False) and not entry.is_dir(follow_symlinks=False):
                    name = Path(entry.path).relative_to(folder)
                    raise InputError(field, str(folder), f"{name} in it is a link or a device: plain files are allowed")


def write_atomically(target: Path, fill: Callable[[Any], object], durable: bool = True) -> None:
    """Write a file so that it appears whole or not at all; if ``durable``, on the disk before this returns."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            fill(file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def write_whole(path: str, content: bytes) -> None:
    """Write a file of the user's so that it appears whole or not at all; StoreError if it cannot be written."""
    try:
        write_atomically(Path(path).absolute(), lambda file: file.write(content))
    except OSError as error:
        raise StoreError(f"out: {path}; it cannot be written ({error.strerror or error})") from error


def sync_file(path: Path) -> None:
    """Put a file on the disk, if it is still there."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(path: Path) -> None:
    """Put a folder's names on the disk, so that what follows may rely on them after a power failure."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems know no such thing
            raise
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked(path: Path, wait: float = PATIENCE) -> Iterator[None]:
    """Hold a lock file; it is free again when its holder ends, however that happens.

    Raises
    ------
    BlockingIOError
        If another process holds it for longer than ``wait`` seconds.
    """
    with open(path, "a", encoding="utf-8") as file:
        deadline, pause = time.monotonic() + wait, 0.0005
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise BlockingIOError(errno.EWOULDBLOCK, f"another process holds {path}") from None
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        yield


def remove_leavings(folder: Path, begin: tuple[str, ...] = (".",)) -> None:
    """Remove temporary files that a killed writer left, by how their names begin.

    The caller holds the lock under which they are written.
    """
    for name in os.listdir(folder):
        if name.startswith(begin):
            with contextlib.suppress(OSError):
                os.unlink(folder / name)
