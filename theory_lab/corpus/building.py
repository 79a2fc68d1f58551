"""Making a corpus: read, clean, leave repetitions out, split by document, learn a tokenizer, encode.

The folder appears whole or not at all. The same sources and settings give the same bytes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from theory_lab import __version__
from theory_lab.corpus.deduplication import Deduplicator
from theory_lab.corpus.documents import Document, Origin, read_path
from theory_lab.corpus.reading import FORMAT, SPLITS, TOKEN, Corpus
from theory_lab.corpus.tokenizer import check_vocabulary, tokenizer_settings, train_tokenizer
from theory_lab.errors import InputError, StoreError
from theory_lab.outside import expanded
from theory_lab.tasks.source import EOS

if TYPE_CHECKING:
    from theory_lab.settings import Progress

#: Characters from which the tokenizer is learned.
_LEARNED = 40_000_000
#: Characters from which a larger vocabulary pays.
_LARGE = 64_000_000
#: Seconds without a word while a source is read.
_SILENCE = 10.0
#: Characters a batch of the encoder.
_BATCH = 1_000_000
#: A data set is read until it has so many characters for each token that is wanted.
_CHARACTERS_A_TOKEN = 8


@dataclass(frozen=True)
class Plan:
    """What to build a corpus from, and how.

    Parameters
    ----------
    sources : sequence of str
        Files, folders, or data sets ``owner/name`` of the Hub.
    debian : sequence of str
        Packages of :data:`theory_lab.corpus.debian.PACKAGES`.
    debs : path, optional
        A folder that has the packages' ``.deb`` files; they are downloaded if None.
    vocabulary : int, optional
        Tokens of its tokenizer, special ones and the 256 bytes included. By default 2,048, and 8,192 from 64 million
        characters up; fewer where the text has no more pieces.
    name : str, optional
        The folder's name if None.
    validation : float
        Share of the characters that goes into the validation split, by whole documents; in (0, 0.5].
    max_tokens : int, optional
        At most so many tokens in both splits: a random choice of documents, the same each time.
    license, column, config, split : str
        Of sources: the license if they do not say, the column of the text, a data set's configuration and split.
    deduplicate : bool
        Whether repetitions go.
    """

    sources: Sequence[str] = ()
    debian: Sequence[str] = ()
    debs: Path | None = None
    vocabulary: int | None = None
    name: str | None = None
    validation: float = 0.03
    max_tokens: int | None = None
    license: str | None = None
    column: str = "text"
    config: str | None = None
    split: str = "train"
    deduplicate: bool = True

    def check(self) -> None:
        """InputError for anything that can be known to be wrong before reading."""
        if self.vocabulary is not None:
            check_vocabulary(self.vocabulary)
        if not self.sources and not self.debian:
            raise InputError("source", "nothing", "files, folders, data sets owner/name, or --debian are allowed")
        if not 0.0 < self.validation <= 0.5:
            raise InputError("validation", self.validation, "a share above 0 and up to 0.5 is allowed")
        if self.max_tokens is not None and self.max_tokens < 1000:
            raise InputError("max-tokens", self.max_tokens, "a whole number from 1,000 up is allowed")
        if self.debian:
            from theory_lab.corpus.debian import check_packages

            check_packages(self.debian)


@dataclass
class _Kept:
    """A document in the spool."""

    origin: int
    offset: int
    size: int
    characters: int
    digest: bytes


@dataclass
class _Spool:
    """Documents that were kept, on the disk, since a corpus need not fit the memory."""

    file: IO[bytes]
    kept: list[_Kept] = field(default_factory=list)

    def add(self, origin: int, text: str) -> None:
        raw = text.encode("utf-8", "replace")
        self.kept.append(
            _Kept(origin, self.file.tell(), len(raw), len(text), hashlib.blake2b(raw, digest_size=12).digest())
        )
        self.file.write(raw)

    def text(self, item: _Kept) -> str:
        self.file.seek(item.offset)
        return self.file.read(item.size).decode("utf-8")


def build_corpus(out: str | Path, plan: Plan, *, progress: Progress | None = None) -> Corpus:
    """Make a corpus in the folder ``out``, which must not exist or be empty.

    Raises
    ------
    InputError
        If a source cannot be read or has no text, or there is too little text for the vocabulary or for two splits.
    StoreError
        If the disk is full or cannot be written.
    """
    plan.check()
    target = expanded(out).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError("out", str(out), "a new or empty folder is allowed")
    with _writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        with _writing(target):
            _fill(made, target.name, plan, progress)
            os.chmod(made, 0o755)
            if target.exists():
                target.rmdir()
            os.rename(made, target)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return Corpus.open(target)


def _fill(folder: Path, fallback: str, plan: Plan, progress: Progress | None) -> None:
    scratch = folder / "scratch"
    scratch.mkdir()
    filter_ = Deduplicator() if plan.deduplicate else None
    origins: list[Origin] = []
    with open(scratch / "spool", "w+b") as file:
        spool = _Spool(file)
        for origin, documents in _sources(plan, scratch):
            origins.append(origin)
            before = len(spool.kept)
            said = time.monotonic()
            for document in documents:
                text = filter_.keep(document.text) if filter_ else document.text
                if text:
                    spool.add(len(origins) - 1, text)
                if time.monotonic() - said > _SILENCE:
                    said = time.monotonic()
                    _say(progress, f"{origin.name}: {origin.documents:,} documents, {file.tell() / 1e6:,.0f} MB in all")
            _say(progress, f"{origin.name}: {origin.documents:,} documents, {len(spool.kept) - before:,} kept")
        if not spool.kept:
            raise InputError("source", ", ".join(o.name for o in origins), "no text was found: text files are needed")
        _one_document_each(spool, plan)
        splits = _split(spool.kept, plan)
        tokenizer = _learned(spool, splits, plan)
        if plan.max_tokens is not None:
            splits = _choice(spool, splits, tokenizer, plan.max_tokens)
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_bytes(tokenizer_settings())
        counts, by_origin = _encode(folder, spool, splits, tokenizer, len(origins), progress)
    shutil.rmtree(scratch)
    for split, count in counts.items():
        if count["tokens"] < 2:
            raise InputError("source", ", ".join(o.name for o in origins), f"too little text for a {split} split")
    _notices(folder, origins)
    manifest = {
        "format": FORMAT,
        "name": plan.name or fallback,
        "sources": [
            {**{key: value for key, value in asdict(origin).items() if key != "notice"}, **numbers}
            for origin, numbers in zip(origins, by_origin, strict=True)
        ],
        "splits": counts,
        "split": {"by": "document", "validation": plan.validation},
        "left_out": asdict(filter_.found) if filter_ else None,
        "max_tokens": plan.max_tokens,
        "tokenizer": {
            "kind": "byte-level BPE, digits apart",
            "vocab_size": tokenizer.get_vocab_size(),
            "sha256": _sha256(folder / "tokenizer.json"),
        },
        "versions": {"theory_lab": __version__, "tokenizers": metadata.version("tokenizers")},
    }
    text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
    with open(folder / "manifest.json", "w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())


def _sources(plan: Plan, scratch: Path) -> Iterator[tuple[Origin, Iterable[Document]]]:
    if plan.debian:
        from theory_lab.corpus.debian import download, read_package
    for name in plan.debian:
        place = scratch / name
        place.mkdir()
        deb = _local_deb(plan.debs, name) if plan.debs is not None else download(name, scratch)
        yield read_package(name, deb, place)
        shutil.rmtree(place)
    for source in plan.sources:
        from theory_lab.corpus.hub import is_dataset_id, read_dataset

        if is_dataset_id(source) and not expanded(source).exists():
            origin, documents = read_dataset(
                source, config=plan.config, split=plan.split, column=plan.column, license=plan.license
            )
            most = None if plan.max_tokens is None else plan.max_tokens * _CHARACTERS_A_TOKEN
            yield origin, documents if most is None else _until(documents, most)
        else:
            yield read_path(source, plan.license or "unknown", plan.column)


def _local_deb(folder: Path, name: str) -> Path:
    found = sorted(folder.glob(f"{name}_*.deb"))
    if not found:
        raise InputError("debs", str(folder), f"it has no {name}_*.deb")
    return found[-1]


def _until(documents: Iterable[Document], characters: int) -> Iterator[Document]:
    for document in documents:
        yield document
        characters -= len(document.text)
        if characters <= 0:
            return


def _one_document_each(spool: _Spool, plan: Plan) -> None:
    """Cut the longest document in two if no choice of whole documents makes a validation split of about its share."""
    total = sum(item.characters for item in spool.kept)
    if any(item.characters <= 2.0 * plan.validation * total for item in spool.kept) and len(spool.kept) > 1:
        return
    at = max(range(len(spool.kept)), key=lambda index: spool.kept[index].characters)
    item = spool.kept[at]
    text = spool.text(item)
    cut = len(text) - max(1, round(plan.validation * total))
    border = text.rfind("\n\n", len(text) // 2, cut)
    cut = border + 2 if border > 0 else cut
    if not 0 < cut < len(text):
        raise InputError("source", f"{total:,} characters", "too little text for a training and a validation split")
    spool.file.seek(0, os.SEEK_END)
    spool.add(item.origin, text[:cut])
    spool.add(item.origin, text[cut:])
    back, front = spool.kept.pop(), spool.kept.pop()
    spool.kept[at : at + 1] = [front, back]


def _split(kept: Sequence[_Kept], plan: Plan) -> list[str]:
    """The split of each document: by a hash of its text, validation until it has its share.

    A document that would take validation far beyond its share stays in training.
    """
    total = sum(item.characters for item in kept)
    wanted = plan.validation * total
    splits = ["train"] * len(kept)
    taken = 0
    for index in sorted(range(len(kept)), key=lambda i: kept[i].digest):
        size = kept[index].characters
        if taken < wanted and taken + size <= 2.0 * wanted:
            splits[index] = "validation"
            taken += size
    if not taken and len(kept) > 1:
        splits[min(range(len(kept)), key=lambda i: kept[i].characters)] = "validation"
    return splits


def _learned(spool: _Spool, splits: Sequence[str], plan: Plan) -> Any:
    """A tokenizer learned from the training split, or from as much of it as there is need for."""

    def texts() -> Iterator[str]:
        read = 0
        for index in sorted(range(len(splits)), key=lambda i: spool.kept[i].digest):
            if splits[index] == "train" and read < _LEARNED:
                read += spool.kept[index].characters
                yield spool.text(spool.kept[index])

    if plan.vocabulary is not None:
        return train_tokenizer(texts(), plan.vocabulary)
    large = sum(item.characters for item in spool.kept) >= _LARGE
    return train_tokenizer(texts(), 8192 if large else 2048, at_most=True)


def _choice(spool: _Spool, splits: Sequence[str], tokenizer: Any, most: int) -> list[str]:
    """Keep a random choice of documents of at most so many tokens; the splits of those kept."""
    where = {id(item): split for item, split in zip(spool.kept, splits, strict=True)}
    chosen: set[int] = set()
    used = 0
    # Another part of the hash than the split goes by: both splits keep their shares.
    for batch in _batches(sorted(spool.kept, key=lambda item: item.digest[6:])):
        for item, ids in zip(batch, _encoded(spool, batch, tokenizer), strict=True):
            if used + len(ids) + 1 <= most:
                used += len(ids) + 1
                chosen.add(id(item))
        if used > 0.999 * most:
            break
    spool.kept = [item for item in spool.kept if id(item) in chosen]
    return [where[id(item)] for item in spool.kept]


def _batches(items: Sequence[_Kept]) -> Iterator[list[_Kept]]:
    batch: list[_Kept] = []
    size = 0
    for item in items:
        batch.append(item)
        size += item.characters
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encoded(spool: _Spool, batch: Sequence[_Kept], tokenizer: Any) -> list[list[int]]:
    texts = [spool.text(item) for item in batch]
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def _encode(
    folder: Path,
    spool: _Spool,
    splits: Sequence[str],
    tokenizer: Any,
    origins: int,
    progress: Progress | None,
) -> tuple[dict[str, dict[str, Any]], list[dict[str, int]]]:
    """Write the token files; numbers by split and by origin."""
    by_origin = [dict.fromkeys(("kept_documents", "characters", "tokens"), 0) for _ in range(origins)]
    counts: dict[str, dict[str, Any]] = {}
    where = {id(item): split for item, split in zip(spool.kept, splits, strict=True)}
    if progress is not None:
        progress.start(len(spool.kept), 0, float(sum(item.characters for item in spool.kept)))
    for split in SPLITS:
        starts: list[int] = []
        digest = hashlib.sha256()
        tokens = characters = size = 0
        with open(folder / f"{split}.bin", "wb") as file:
            for batch in _batches([item for item in spool.kept if where[id(item)] == split]):
                for item, ids in zip(batch, _encoded(spool, batch, tokenizer), strict=True):
                    raw = np.array([*ids, EOS], dtype=TOKEN).tobytes()
                    file.write(raw)
                    digest.update(raw)
                    starts.append(tokens)
                    tokens += len(ids) + 1
                    characters += item.characters
                    size += item.size
                    numbers = by_origin[item.origin]
                    numbers["kept_documents"] += 1
                    numbers["characters"] += item.characters
                    numbers["tokens"] += len(ids) + 1
                if progress is not None:
                    progress.advance(len(batch), float(sum(item.characters for item in batch)))
            file.flush()
            os.fsync(file.fileno())
        np.save(folder / f"{split}.documents.npy", np.array(starts, dtype=np.int64))
        counts[split] = {
            "documents": len(starts),
            "tokens": tokens,
            "characters": characters,
            "bytes": size,
            "sha256": digest.hexdigest(),
        }
    return counts, by_origin


def _notices(folder: Path, origins: Sequence[Origin]) -> None:
    """Licenses in full, beside the corpus."""
    if not any(origin.notice for origin in origins):
        return
    (folder / "licenses").mkdir()
    for origin in origins:
        if origin.notice:
            (folder / "licenses" / f"{origin.name}.txt").write_text(origin.notice, encoding="utf-8")


def _say(progress: Progress | None, message: str) -> None:
    if progress is not None:
        progress.say(message)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreError(f"out: {target}; the disk is full: make room, or name a folder on another disk") from error
        raise StoreError(f"out: {target}; it cannot be written ({error.strerror or error})") from error
