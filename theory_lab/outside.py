"""What comes from outside: names, texts, files and libraries' errors, made harmless before they are shown or kept.

A text that a stranger supplied can act on a terminal (escape sequences), on a reader (marks that turn the direction of
writing) or on a spreadsheet (a cell that begins with ``=`` is a formula). Nothing here imports more than the standard
library.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

#: Largest JSON file read whole, in bytes: tokenizers of large vocabularies are a tenth of it.
MOST_JSON = 256 << 20
#: Deepest nesting of JSON and TOML. From Python 3.12 on thousands of levels are read, which no recursion after that can
#: walk through; configurations, tokenizers and results have a dozen.
MOST_NESTED = 100
#: Largest TOML file, in bytes.
MOST_TOML = 1 << 19

#: Characters that would act instead of being read: controls, direction marks, halves of a pair, line breaks.
_ACTING = ("Cc", "Cf", "Cs", "Zl", "Zp")
#: What a cell begins with that a spreadsheet takes for a formula, or that a spreadsheet drops to find one.
_FORMULA = re.compile(r"'*[=+\-@\t\r\n＝＋－＠]")  # the wide ones count too
_CELL_INSIDE = re.compile(r"([,;|][\s\"']*)(?=[=+\-@＝＋－＠])")
_NUMBER = re.compile(r"[+-]?((\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?|inf|nan)", re.IGNORECASE | re.ASCII)

#: Most parts of a dotted key: for every statement the decoder walks through those of its table, and its own squared.
MOST_PARTS = 32

# Comments, strings, whatever may stand in a key, dots between; every match takes all it can, so that reading is linear.
_TOML = re.compile(
    r'''(?P<other>\#[^\n]*+|"""(?:[^"\\]|\\.|"(?!""))*+(?:""")?|\'\'\'(?:[^']|'(?!''))*+(?:\'\'\')?)'''
    r"""|(?P<part>[\w+-]++|"(?:[^"\\\n]|\\.)*+"?|'[^'\n]*+'?)|(?P<dot>\.)|[ \t]++|(?P<end>.)""",
    re.DOTALL,
)


def visible(text: object) -> str:
    """The text with acting characters replaced by their names: token texts hold line breaks, and may hold worse."""
    whole = str(text)
    if whole.isascii() and whole.isprintable():
        return whole
    return "".join(_shown(c) for c in whole)


def _shown(character: str) -> str:
    if character == "\n":
        return "⏎"
    if unicodedata.category(character) in _ACTING:
        return f"[U+{ord(character):04X}]"
    return character


def one_line(text: object, most: int | None = None) -> str:
    """The text as one plain line of at most so many characters: white space is one blank, acting characters names."""
    line = visible(" ".join(str(text).split()))
    return line if most is None or len(line) <= most else line[: most - 3] + "..."


def defused(value: Any) -> Any:
    """A cell for a CSV file: text that a spreadsheet would take for a formula gets an apostrophe in front.

    Numbers as text, and a single ``-`` or ``+``, stay as they are. :func:`undefused` takes it away again. Carriage
    returns become line feeds.
    """
    if isinstance(value, str) and "\r" in value:
        # Python quotes no cell for one, and a reader would begin a row there, whose first cell it does not guard.
        value = value.replace("\r\n", "\n").replace("\r", "\n")
    if not isinstance(value, str) or value in ("-", "+"):
        return value
    if not _FORMULA.match(value) or _NUMBER.fullmatch(value):
        return value
    return "'" + value


def undefused(value: Any) -> Any:
    """The cell that :func:`defused` was given."""
    if isinstance(value, str) and value.startswith("'") and _FORMULA.match(value):
        return value[1:]
    return value


def defused_frame(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows whose texts and column names are safe in a spreadsheet; shares what needs no change."""
    safe = rows.rename(columns=defused)
    for place, kind in enumerate(rows.dtypes):
        if kind.kind not in "iufbM":
            column = rows.iloc[:, place]
            if kind == "str" and all(defused(text) == text for text in column.dropna().unique()):
                continue  # of many rows there are few texts
            safe.isetitem(place, column.map(defused).array)
    return safe


def defused_line(text: object) -> str:
    """A text for a line before a CSV file's rows: one line, in which no separator is followed by a formula."""
    return _CELL_INSIDE.sub(r"\1'", one_line(text))


def expanded(path: str | Path) -> Path:
    """The path with ``~`` and ``~name`` replaced; as it is if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def read_json(path: Path, most: int = MOST_JSON) -> Any:
    """The content of a JSON file.

    Raises
    ------
    OSError
        If it cannot be read.
    ValueError
        If it is larger than ``most`` bytes, no UTF-8, no JSON, or nested beyond measure; one line says which.
    """
    with open(path, "rb") as file:
        raw = read_at_most(file, most + 1)
    if len(raw) > most:
        raise ValueError(f"more than {most >> 20} MiB")
    return parse_json(raw)


def read_at_most(file: IO[bytes], most: int) -> bytes:
    """The first bytes of a file or pipe; ``file.read(most)`` would set aside so many before it reads one."""
    parts, left = [], most
    while left > 0 and (part := file.read(min(left, 1 << 20))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def parse_json(raw: bytes | str) -> Any:
    """The value of a JSON text; ValueError, in one line, if it is none."""
    try:
        found = json.loads(raw)
    except RecursionError:
        raise ValueError("nested too deep") from None
    opened = (b"[", b"{") if isinstance(raw, bytes) else ("[", "{")
    if sum(map(raw.count, opened)) > MOST_NESTED:  # type: ignore[arg-type]  # both are of raw's kind
        check_nesting(found)
    return found


def check_nesting(tree: Any) -> None:
    """ValueError if lists and dictionaries lie in each other more than :data:`MOST_NESTED` deep."""
    level = [tree]
    for _ in range(MOST_NESTED):
        level = [
            inner
            for one in level
            if isinstance(one, (dict, list))
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return
    raise ValueError("nested too deep")


def parse_toml(text: str) -> dict[str, Any]:
    """The data of a TOML text, within seconds.

    Raises
    ------
    tomllib.TOMLDecodeError
        If it is not TOML.
    ValueError
        If it is not usable: larger than :data:`MOST_TOML`, a key of more than :data:`MOST_PARTS` parts, a number of
        thousands of digits, tables or lists nested beyond measure. One line says which.
    """
    import tomllib  # not for every command

    if len(text) > MOST_TOML:
        raise ValueError(f"at most {MOST_TOML >> 10} KiB are allowed")
    if text.count(".") >= MOST_PARTS:
        parts, joined = 0, False
        for token in _TOML.finditer(text):
            if token.lastgroup == "part":
                parts = parts + 1 if joined else 1
                if parts > MOST_PARTS:
                    line = text.count("\n", 0, token.start()) + 1
                    raise ValueError(f"line {line}: keys of at most {MOST_PARTS} parts are allowed")
            elif token.lastgroup is None:
                continue  # blanks, which may stand around a dot
            joined = token.lastgroup == "dot"
    try:
        found = tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    check_nesting(found)
    return found


def read_npy(path: Path, most: int) -> np.ndarray:
    """The array of an ``.npy`` file of at most ``most`` numbers.

    The header is believed only as far as the file bears it out, and nothing is unpickled.

    Raises
    ------
    OSError
        If it cannot be read.
    ValueError
        If it is damaged, no ``.npy`` file, too large, or holds Python objects; one line says which.
    """
    import numpy as np

    form = np.lib.format
    with open(path, "rb") as file, foreign(lambda why: ValueError(f"its header is damaged: {why}")):
        version = form.read_magic(file)
        read = {(1, 0): form.read_array_header_1_0, (2, 0): form.read_array_header_2_0}.get(version)
        if read is None:
            raise ValueError(f"version {version[0]}.{version[1]} of the format")
        shape, _, dtype = read(file)
        size = path.stat().st_size - file.tell()
        count = math.prod(int(n) for n in shape)
        least = min(shape, default=0)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which run code when opened")
    if least < 0 or count > most:
        raise ValueError(f"it says it holds {count:,} numbers, and at most {most:,} are allowed")
    if count * dtype.itemsize > size:
        raise ValueError(f"it says it holds {count:,} numbers, and has {size:,} bytes")
    return np.load(path, allow_pickle=False)


@contextlib.contextmanager
def foreign(error_for: Callable[[str], Exception]) -> Iterator[None]:
    """Turn whatever a library raises for a damaged file into ``error_for(one line)``.

    Each library raises its own, and those in Rust panic with an error that is no ``Exception``. Errors that are made
    for users, a lack of memory and an interruption pass.
    """
    from theory_lab.errors import TheoryLabError

    try:
        yield
    except (TheoryLabError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise error_for(reason(error)) from error


def reason(error: BaseException) -> str:
    """An error of a library as one short line."""
    if isinstance(error, OSError) and error.strerror:
        return one_line(error.strerror, 200)
    lines = [line for line in str(error).splitlines() if line.strip()]
    first = " ".join(lines[: 2 if lines[0].rstrip().endswith(":") else 1]) if lines else ""
    return f"{type(error).__name__}: {one_line(first, 200)}" if first else type(error).__name__
