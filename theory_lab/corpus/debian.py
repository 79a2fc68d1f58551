"""Text from Debian's documentation packages, for machines that reach a Debian mirror and nothing else.

Packages come through ``apt-get download``, which checks them against the archive's signatures, and are unpacked with
``dpkg-deb`` into a temporary folder: nothing is installed and nothing of them runs.
"""

from __future__ import annotations

import fnmatch
import hashlib
import itertools
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from theory_lab.corpus.documents import Document, Origin, plain_text, walk
from theory_lab.errors import InputError, hint

#: Dictionaries are cut into documents of about so many characters, at the border of two entries.
_PIECE = 20_000


@dataclass(frozen=True)
class Package:
    """What to take from a package: files by pattern, and the license of their text."""

    license: str
    take: tuple[str, ...]
    leave: tuple[str, ...] = ()
    reader: Callable[[str, bytes], Iterator[Document]] | None = None


def _whole(name: str, raw: bytes) -> Iterator[Document]:
    text = plain_text(name, raw, documentation=True)
    if text is not None and text.strip():
        yield Document(name, text)


def _bible(name: str, raw: bytes) -> Iterator[Document]:
    """The books of ``bible.data``: windows of Unix ``compress``, behind a table of where they begin, big-endian."""
    _, count = struct.unpack_from(">II", raw, 0x54)
    starts = [*struct.unpack_from(f">{count}I", raw, 0x5C), len(raw)]
    parts = []
    for start, end in itertools.pairwise(starts):
        packed = b"\x1f\x9d\x90" + raw[start:end]  # the windows come without their magic number
        parts.append(subprocess.run(["gzip", "-dc"], input=packed, capture_output=True, check=True).stdout)
    book = ""
    verses: list[str] = []
    for line in b"".join(parts).decode("latin-1").splitlines():
        verse = re.match(r"(\d?[A-Za-z]+)(\d+):(\d+) (.*)", line)
        if not verse:
            continue
        if verse[1] != book and verses:
            yield Document(f"{name}/{book}", "".join(verses).strip())
            verses = []
        book = verse[1]
        verses.append(("\n\n" if verse[3] == "1" else " ") + verse[4])
    if verses:
        yield Document(f"{name}/{book}", "".join(verses).strip())


def _dictionary(name: str, raw: bytes) -> Iterator[Document]:
    text = (plain_text(name, raw, documentation=True) or "").replace("\n   [1913 Webster]", "")
    yield from pieces(name, re.split(r"\n\n(?=\S)", text))


def _wordnet(name: str, raw: bytes) -> Iterator[Document]:
    """Words and glosses of ``data.noun`` and its like: one synset a line."""
    entries = []
    for line in raw.decode("utf-8", "replace").splitlines():
        fields, bar, gloss = line.partition(" | ")
        words = fields.split(" ")
        if not bar or line.startswith(" ") or len(words) < 6:
            continue
        count = int(words[3], 16)
        names = [word.replace("_", " ") for word in words[4 : 4 + 2 * count : 2]]
        entries.append(f"{', '.join(names)}: {gloss.strip()}")
    yield from pieces(name, entries)


def pieces(name: str, entries: Sequence[str]) -> Iterator[Document]:
    """Documents of about 20,000 characters from a long row of entries."""
    held: list[str] = []
    size = number = 0
    for entry in entries:
        held.append(entry)
        size += len(entry) + 2
        if size >= _PIECE:
            yield Document(f"{name}/{number}", "\n\n".join(held))
            held, size, number = [], 0, number + 1
    if held:
        yield Document(f"{name}/{number}", "\n\n".join(held))


_PAGES = ("*/genindex*", "*/search.html", "*/py-modindex.html", "*/contents.html", "*/_sources/*", "*/_static/*")

#: Packages by name, in the order in which they are read: of two texts that repeat each other the first one stays.
PACKAGES: dict[str, Package] = {
    "bible-kjv-text": Package("public domain (King James Version)", ("usr/lib/bible.data",), reader=_bible),
    "anarchism": Package("GPL-2", ("usr/share/doc/anarchism/html/*.html",)),
    "debian-handbook": Package("CC-BY-SA-3.0 or GPL-2+", ("usr/share/doc/debian-handbook/html/en-US/*.html",)),
    "python3.11-doc": Package("PSF-2.0", ("usr/share/doc/python3.11/html/*.html",), _PAGES),
    "perl-doc": Package(
        "GPL-1+ or Artistic",
        ("usr/share/perl/*/pod/*.pod", "usr/share/man/man3/*"),
        ("*/perltoc.pod", "*/perluniprops.pod", "*/perlcn.pod", "*/perljp.pod", "*/perlko.pod", "*/perltw.pod"),
    ),
    "postgresql-doc-15": Package("PostgreSQL", ("usr/share/doc/*/html/*.html",), ("*/bookindex.html",)),
    "manpages": Package("Linux-man-pages-copyleft, GPL-2+ and others", ("usr/share/man/man*",)),
    "wordnet-base": Package("WordNet-3.0", ("usr/share/wordnet/data.*",), reader=_wordnet),
    "dict-gcide": Package("GPL-2+", ("usr/share/dictd/gcide.dict.dz",), reader=_dictionary),
    "linux-doc-6.1": Package(
        "GPL-2 and others", ("usr/share/doc/linux-doc-6.1/html/*.html",), (*_PAGES, "*/process/maintainers.html")
    ),
}


def check_packages(names: Sequence[str]) -> None:
    """InputError unless all names are known and the tools are there."""
    for name in names:
        if name not in PACKAGES:
            raise InputError("packages", name, f"{hint(name, PACKAGES)}{', '.join(PACKAGES)} are allowed")


def download(name: str, folder: Path) -> Path:
    """Download a package into a folder; InputError if it cannot be had."""
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise InputError("debian", tool, "it is not installed: a Debian system is needed, or name files or folders")
    done = subprocess.run(
        ["apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", name],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = sorted(folder.glob(f"{name}_*.deb"))
    if done.returncode or not found:
        reason = next((line for line in done.stderr.splitlines() if line.startswith("E:")), "no such file came")
        raise InputError("packages", name, f"it cannot be downloaded ({reason.strip()}); is apt-get update needed?")
    return found[0]


def read_package(name: str, deb: Path, scratch: Path) -> tuple[Origin, Iterator[Document]]:
    """Documents of a package's ``.deb`` file.

    Parameters
    ----------
    name : str
        One of ``PACKAGES``.
    deb : path
    scratch : path
        An empty folder to unpack into.

    Raises
    ------
    InputError
        If it cannot be unpacked.
    """
    wanted = PACKAGES[name]
    done = subprocess.run(["dpkg-deb", "-x", str(deb), str(scratch)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError("packages", str(deb), f"it cannot be unpacked ({' '.join(done.stderr.split())})")
    version = subprocess.run(
        ["dpkg-deb", "-f", str(deb), "Version"], capture_output=True, text=True, check=True
    ).stdout.strip()
    with open(deb, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    notice = scratch / "usr/share/doc" / name / "copyright"
    origin = Origin("debian", name, version, wanted.license, digest)
    if notice.is_file() and not notice.is_symlink():
        origin.notice = notice.read_text(encoding="utf-8", errors="replace")
    return origin, _documents(wanted, scratch, origin)


def _documents(wanted: Package, root: Path, origin: Origin) -> Iterator[Document]:
    reader = wanted.reader or _whole
    for file in walk(root):
        name = file.relative_to(root).as_posix()
        taken = any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted.take)
        if not taken or any(fnmatch.fnmatchcase(f"/{name}", pattern) for pattern in wanted.leave):
            continue
        before = origin.documents
        for document in reader(f"{origin.name}/{Path(name).name}", file.read_bytes()):
            origin.documents += 1
            yield document
        origin.skipped += origin.documents == before
