"""Where fetched and converted models lie, and how a folder of them appears whole or not at all.

::

    CACHE/models/<name>/            one model: config.json, model.safetensors, tokenizer files
    CACHE/models/<name>/theory-lab.json   where it came from, and the size of every file: its presence says "whole"
    CACHE/models/.<name>.lock       held while it is made
    CACHE/models/.<name>-<random>/  being made; left only by a process that was killed, and removed by the next

CACHE is the folder named by ``THEORY_LAB_CACHE``, else ``theory-lab`` in ``XDG_CACHE_HOME``, else ``~/.cache``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from theory_lab.errors import InputError, StoreError
from theory_lab.outside import expanded

MANIFEST = "theory-lab.json"


def cache_dir() -> Path:
    """The folder for everything that can be fetched or computed again. It need not exist yet."""
    chosen = os.environ.get("THEORY_LAB_CACHE", "")
    if chosen:
        return expanded(chosen).absolute()
    # The XDG specification says to ignore a relative path here.
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "theory-lab"


def model_folder(name: str) -> Path:
    """Where the model of that name lies or would lie."""
    return cache_dir() / "models" / name


def is_cached(folder: Path) -> bool:
    """Whether a folder made by :func:`make_folder` is there with every file at its full size."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return all((folder / file).stat().st_size == size for file, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextlib.contextmanager
def writing(what: Path) -> Iterator[None]:
    """Turn errors of the file system into one line."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise no_room(what) from error
        reason = error.strerror or str(error)
        raise StoreError(
            f"cache: {what}; it cannot be written ({reason}); set THEORY_LAB_CACHE to a folder that can"
        ) from error


def no_room(where: Path, needed: int | None = None) -> StoreError:
    """The error for a full disk."""
    size = "" if needed is None else f", {needed / 1e6:,.0f} MB are needed"
    return StoreError(f"cache: {where}; the disk is full{size}; make room, or set THEORY_LAB_CACHE to another disk")


def check_room(where: Path, needed: int) -> None:
    """Raise StoreError now if the disk that holds ``where`` (or will) has fewer free bytes than ``needed``."""
    existing = where
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    with contextlib.suppress(OSError):
        if shutil.disk_usage(existing).free < needed:
            raise no_room(where, needed)


def make_folder(
    target: Path,
    fill: Callable[[Path], Mapping[str, Any]],
    *,
    waiting: Callable[[], None] | None = None,
    lock: bool = True,
) -> Path:
    """Let ``fill`` make a folder, which then appears under its name in one step.

    Parameters
    ----------
    target : path
        The folder to make.
    fill : callable
        Gets an empty folder beside it, fills it, and returns what its manifest shall say.
    waiting : callable, optional
        Called once if another process is making the same folder.
    lock : bool
        Whether others may make it at the same time, and whether one that is there already will do: so it is in the
        cache, and not in a folder that a user names.

    Raises
    ------
    InputError
        If something that is not ours has the name.
    StoreError
        If the disk is full or cannot be written.
    """
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target, waiting) if lock else contextlib.nullcontext():
        if lock and is_cached(target):
            return target
        with writing(target):
            for stale in target.parent.glob(f".{target.name}-*"):
                shutil.rmtree(stale, ignore_errors=True)
            made = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
        try:
            with writing(target):
                about = fill(made)
                _finish(made, about)
                discard_folder(target)
                os.rename(made, target)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
    return target


def discard_folder(target: Path) -> None:
    """Remove a folder of ours, if there is one; InputError for a folder that is not."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise InputError("model", str(target), "a folder is allowed here, and this is something else")
    if not target.exists():
        return
    if not (target / MANIFEST).exists() and any(target.iterdir()):
        raise InputError("model", str(target), f"it holds files but no {MANIFEST}: move it away, or name another")
    # A rename first: whoever looks sees the whole folder or none.
    doomed = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    os.rename(target, doomed / "old")
    shutil.rmtree(doomed, ignore_errors=True)


@contextlib.contextmanager
def _locked(target: Path, waiting: Callable[[], None] | None) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        with writing(target):
            file = stack.enter_context(open(target.parent / f".{target.name}.lock", "a", encoding="utf-8"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is not None:
                waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _finish(folder: Path, about: Mapping[str, Any]) -> None:
    """Flush everything to the disk and write the manifest last."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        os.chmod(path, 0o644)
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    with open(folder / MANIFEST, "w", encoding="utf-8") as file:
        json.dump({**about, "files": sizes}, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    os.chmod(folder, 0o755)
