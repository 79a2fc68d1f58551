"""Documents from files and folders, and what is known of where they come from."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from theory_lab.corpus.plain import clean, from_html, from_man, from_pod
from theory_lab.errors import InputError
from theory_lab.outside import expanded, parse_json

#: Largest file read, in bytes, and largest text that is unpacked of one.
MOST_BYTES, MOST_UNPACKED = 1 << 30, 1 << 28
_MAN = re.compile(r"\.[1-9][a-zA-Z0-9]*$")
_LINES = (".jsonl", ".ndjson")


class Document(NamedTuple):
    """A text and what it is called."""

    name: str
    text: str


@dataclass
class Origin:
    """Where documents come from; ``sha256``, ``documents`` and ``skipped`` are known once they have been read.

    Attributes
    ----------
    kind : {'file', 'folder', 'dataset', 'debian'}
    name, version, license : str
    sha256 : str
        Of the package or the file; of all files read, in order, for a folder or a data set.
    documents : int
        With any text in them, before repetitions go.
    skipped : int
        Files that are no text.
    notice : str
        The license in full, where it came along.
    """

    kind: str
    name: str
    version: str = ""
    license: str = "unknown"
    sha256: str = ""
    documents: int = 0
    skipped: int = 0
    notice: str = field(default="", repr=False)


def decode(raw: bytes) -> str | None:
    """Text from bytes: UTF-8, or UTF-16 with a byte order mark; None if it is neither, or no text."""
    try:
        if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
            return raw.decode("utf-16")
        return None if b"\0" in raw else raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def decode_documentation(raw: bytes) -> str | None:
    """As :func:`decode`; other encodings of one byte a character pass for Latin-1, as in old manual pages."""
    text = decode(raw)
    return raw.decode("latin-1") if text is None and b"\0" not in raw[:8192] else text


def unpacked(raw: bytes, most: int = MOST_UNPACKED) -> bytes:
    """What a gzip file holds, of one member or several.

    Raises
    ------
    OSError
        If it would be more than ``most`` bytes: a thousandth of that may be enough to say so.
    EOFError, zlib.error
        If it is damaged.
    """
    found = bytearray()
    while raw:
        member = zlib.decompressobj(31)
        found += member.decompress(raw, most + 1 - len(found))
        if len(found) > most:
            raise OSError(f"more than {most >> 20} MiB unpacked")
        if not member.eof:
            raise EOFError("it ends too soon")
        raw = member.unused_data.lstrip(b"\0")
    return bytes(found)


def plain_text(name: str, raw: bytes, *, documentation: bool = False) -> str | None:
    """The words of a file by what its name says it is; None if it is no text.

    Parameters
    ----------
    name : str
        With its ending: ``.html``, ``.pod`` and manual pages lose their markup; ``.gz`` is unpacked.
    raw : bytes
    documentation : bool
        Whether what is not UTF-8 is Latin-1.
    """
    if name.endswith((".gz", ".dz")):
        try:
            raw = unpacked(raw)
        except (OSError, EOFError, zlib.error):
            return None
        name = name[:-3]
    text = decode_documentation(raw) if documentation else decode(raw)
    if text is None:
        return None
    suffix = Path(name).suffix.lower()
    if suffix in (".html", ".htm", ".xhtml"):
        # The page's own declaration of its encoding counts, unless it is Unicode anyway.
        return from_html(text if decode(raw) is not None and "<?xml" not in text[:200] else raw)
    if suffix == ".pod":
        return from_pod(text)
    if _MAN.search(name) and re.search(r"^[.'](TH|Dd|SH|\\\")", text, re.MULTILINE):
        return from_man(text)
    return clean(text)


def read_path(path: str, license: str = "unknown", column: str = "text") -> tuple[Origin, Iterator[Document]]:
    """A file, or all text files of a folder and below it, by name.

    Returns
    -------
    origin, documents
        The iterator fills in the origin as it goes.

    Raises
    ------
    InputError
        If there is no such file, it cannot be read or is no text. In a folder such files are passed over and counted.
    """
    place = expanded(path)
    if place.is_dir():
        origin = Origin("folder", str(path), license=license)
        return origin, _folder(place, origin, column)
    if not place.exists():
        raise InputError(
            "source", path, "a file, a folder or the id owner/name of a data set is allowed; there is none"
        )
    origin = Origin("file", str(path), license=license)
    return origin, _file(place, origin, column)


def _file(place: Path, origin: Origin, column: str) -> Iterator[Document]:
    raw = _read(place)
    origin.sha256 = hashlib.sha256(raw).hexdigest()
    found = list(_documents(place.name, raw, column))
    if not found:
        raise InputError("source", str(place), "it is empty, or no text in UTF-8 (or UTF-16 with a byte order mark)")
    origin.documents = len(found)
    yield from found


def _folder(place: Path, origin: Origin, column: str) -> Iterator[Document]:
    digest = hashlib.sha256()
    for file in walk(place):
        raw = _read(file)
        name = file.relative_to(place).as_posix()
        found = list(_documents(name, raw, column))
        if not found:
            origin.skipped += 1
            continue
        digest.update(hashlib.sha256(name.encode("utf-8", "surrogateescape") + b"\0" + raw).digest())
        for document in found:
            origin.documents += 1
            yield document
    origin.sha256 = digest.hexdigest()


def walk(place: Path) -> Iterator[Path]:
    """Files of a folder and below, sorted, without hidden ones and links."""
    for folder, folders, files in os.walk(place):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            file = Path(folder) / name
            if not name.startswith(".") and file.is_file() and not file.is_symlink():
                yield file


def _documents(name: str, raw: bytes, column: str) -> Iterator[Document]:
    inner = name.removesuffix(".gz")
    if inner.endswith(_LINES):
        yield from _json_lines(name, raw, column)
        return
    text = plain_text(name, raw)
    if text is not None and text.strip():
        yield Document(name, text)


def _json_lines(name: str, raw: bytes, column: str) -> Iterator[Document]:
    """One object a line, its text under ``column``."""
    if name.endswith(".gz"):
        with contextlib.suppress(OSError, EOFError, zlib.error):
            raw = unpacked(raw)
    for number, line in enumerate((decode(raw) or "").splitlines(), 1):
        if not line.strip():
            continue
        try:
            text = parse_json(line)[column]
        except (ValueError, KeyError, TypeError):
            raise InputError(
                "source", f"{name}, line {number}", f"a JSON object with text under '{column}' is allowed (--column)"
            ) from None
        if isinstance(text, str) and text.strip():
            yield Document(f"{name}:{number}", clean(text))


def _read(place: Path) -> bytes:
    try:
        if place.stat().st_size > MOST_BYTES:
            raise InputError("source", str(place), f"files of at most {MOST_BYTES >> 20:,} MiB are allowed: split it")
        return place.read_bytes()
    except OSError as error:
        raise InputError("source", str(place), f"it cannot be read ({error.strerror or error})") from None
