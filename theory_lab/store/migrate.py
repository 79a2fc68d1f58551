"""From an older format, or another version of the toolkit, to the present one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from theory_lab.errors import StoreError
from theory_lab.store import manifest
from theory_lab.store.archive import Archive
from theory_lab.store.cells import FORMAT_VERSION, DamagedError, encode, read_cell
from theory_lab.store.files import locked, write_atomically
from theory_lab.streams import STREAM_VERSION


@dataclass(frozen=True)
class Migration:
    """What a migration did.

    Attributes
    ----------
    before : dict
        Format, stream and toolkit version of the manifest as it was.
    rewritten : int
        Cell files brought to the present format.
    damaged : tuple of str
        What could not be read, and stays as it is.
    """

    before: dict[str, Any]
    rewritten: int
    damaged: tuple[str, ...]


def _put(content: bytes, file: IO[bytes]) -> None:
    file.write(content)


def migrate(path: str | Path) -> Migration:
    """Bring a results folder to the present format and version; every block keeps its bits.

    A cell rests on the version of the random streams alone, so that cells of another version of the toolkit are kept.
    Findings of studies rest on all of the code: those of another version stay on the disk, and a resumed run works
    them out anew.

    Raises
    ------
    InputError
        If there is no results folder.
    StoreError
        If its draws are of another stream version, its format is a later one, or it cannot be written.
    """
    archive = Archive(path)
    before = archive.version
    stream = before.get("stream", STREAM_VERSION)
    if stream != STREAM_VERSION:
        raise StoreError(
            f"store: {path}; its draws are of stream version {stream}, this is {STREAM_VERSION}: the same seed gives "
            "other numbers, so that they cannot be continued"
        )
    rewritten, damaged = 0, []
    try:
        for file in archive.loose():
            if file.suffix != ".parquet":
                continue
            with locked(archive.path / ".lock"):
                try:
                    table, about = read_cell(file)
                except FileNotFoundError:
                    continue
                except DamagedError as error:
                    damaged.append(str(error))
                    continue
                if about.get("format", 1) != FORMAT_VERSION:
                    content = encode(file.stem, table, about)
                    write_atomically(file, partial(_put, content))
                    rewritten += 1
        with locked(archive.path / ".lock"):
            write_atomically(archive.path / manifest.NAME, lambda out: out.write(manifest.text()))
    except OSError as error:
        raise StoreError(f"store: {path}; it cannot be written ({error.strerror or error}); nothing is lost") from error
    return Migration(before, rewritten, tuple(damaged))
