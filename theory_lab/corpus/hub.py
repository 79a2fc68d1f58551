"""Documents of a data set of the Hugging Face Hub, streamed: nothing but what is read is downloaded."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from theory_lab.corpus.documents import Document, Origin
from theory_lab.corpus.plain import clean
from theory_lab.errors import InputError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def is_dataset_id(text: str) -> bool:
    """Whether it reads like ``owner/name``."""
    return _ID.fullmatch(text) is not None and not text.startswith(".")


def read_dataset(
    name: str, *, config: str | None = None, split: str = "train", column: str = "text", license: str | None = None
) -> tuple[Origin, Iterator[Document]]:
    """Documents of a data set.

    Parameters
    ----------
    name : str
        ``owner/name`` on the Hub, such as ``HuggingFaceFW/fineweb-edu``, or a local folder of data files.
    config : str, optional
        Of its configurations, such as ``sample-10BT``.
    split, column : str
        Which rows, and which of their columns is the text.
    license : str, optional
        What it says of itself if None.

    Raises
    ------
    InputError
        If the package ``datasets`` is not installed, there is no such data set, or it lacks the column.
    """
    try:
        import datasets
    except ImportError:
        raise InputError("source", name, "pip install 'theory-lab[hub]' to read data sets of the Hub") from None
    try:
        found = datasets.load_dataset(name, config, split=split, streaming=True)
    except Exception as error:  # datasets raises its own, the Hub's, and those of what reads the files
        raise InputError(
            "source", name, f"no such file is here, and it cannot be opened as a data set ({_line(error)})"
        ) from error
    info = getattr(found, "info", None)
    origin = Origin(
        "dataset",
        f"{name}/{config}" if config else name,
        version=str(getattr(info, "version", None) or ""),
        license=license or getattr(info, "license", None) or "unknown",
    )
    return origin, _documents(found, origin, column)


def _documents(rows: Iterable[Mapping[str, Any]], origin: Origin, column: str) -> Iterator[Document]:
    digest = hashlib.sha256()
    steps = iter(rows)
    number = 0
    while True:
        try:
            row = next(steps, None)
        except Exception as error:  # the network in the midst of it
            raise InputError("source", origin.name, f"row {number:,} cannot be read ({_line(error)})") from error
        if row is None:
            break
        if column not in row:
            raise InputError("column", column, f"{origin.name} has {', '.join(row)}")
        text = row[column]
        if isinstance(text, str) and text.strip():
            digest.update(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())
            origin.sha256 = digest.hexdigest()
            origin.documents += 1
            yield Document(f"{origin.name}:{number}", clean(text))
        else:
            origin.skipped += 1
        number += 1


def _line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__
