"""A TOML file that knows its lines, and strict reading of its tables.

Every value is asked for by key and type. What nobody asked for, and what has another type, is one line that names the
file, the line and the key.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from theory_lab.errors import InputError, hint
from theory_lab.grids import parse_numbers, parse_wholes
from theory_lab.outside import MOST_TOML, one_line, parse_toml

Key = tuple[str, ...]

#: Most lines times characters of a file whose errors are placed exactly: that reads every prefix.
_MOST_PREFIXES = 1_500_000


@dataclass
class Document:
    """The text of a TOML file and its name in messages."""

    text: str
    file: str
    data: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, file: str) -> Document:
        """Read a file; InputError, in one line, if it cannot be read or is not TOML."""
        try:
            with open(path, "rb") as handle:
                raw = handle.read(MOST_TOML + 1)
            text = raw.decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise InputError("experiment", file, f"it cannot be read ({why})") from None
        if len(raw) > MOST_TOML:
            raise InputError("experiment", file, f"at most {MOST_TOML >> 10} KiB are allowed")
        try:
            return cls(text, file, parse_toml(text))
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"{file}, {_place(str(error))}", "not valid TOML", str(error).split(" (at")[0]) from None
        except ValueError as error:
            raise InputError(file, "no usable TOML", one_line(error, 200)) from None

    def line(self, key: Key) -> int:
        """The line on which a key's statement begins; that of the nearest table around it if the key is not there.

        TOML is a sequence of statements that end with their line, so that every prefix of whole statements is valid:
        the first valid prefix that holds the key ends with the statement that sets it.
        """
        lines = self.text.split("\n")
        if len(lines) * len(self.text) > _MOST_PREFIXES:
            return self._line_like(key, lines)
        begin, found = 0, [1] * (len(key) + 1)  # of the key's first parts, the line on which they are set
        known = 0
        for end in range(1, len(lines) + 1):
            try:
                data: Any = tomllib.loads("\n".join(lines[:end]))
            except (ValueError, RecursionError):
                continue  # in the middle of a statement
            depth = _held(data, key)
            if depth > known:
                blank = (i for i in range(begin, end) if lines[i].strip() and not lines[i].strip().startswith("#"))
                found[known + 1 : depth + 1] = [next(blank, end - 1) + 1] * (depth - known)
                known = depth
            if known == len(key):
                break
            begin = end
        return found[known]

    @staticmethod
    def _line_like(key: Key, lines: list[str]) -> int:
        """The first line that looks like the key's, for a file that is too long to be read prefix by prefix."""
        for part in reversed(key):
            for number, line in enumerate(lines, 1):
                if line.lstrip(" \t[\"'").startswith(part):
                    return number
        return 1


def _place(message: str) -> str:
    """``line 3, column 5`` out of the decoder's message."""
    start = message.rfind("(at ")
    return message[start + 4 :].rstrip(")") if start >= 0 else "line 1"


def _held(data: Any, key: Key) -> int:
    """How many of the key's first parts there are."""
    for depth, part in enumerate(key):
        if not isinstance(data, dict) or part not in data:
            return depth
        data = data[part]
    return len(key)


class Part:
    """A TOML table that is asked for every key by name and type."""

    def __init__(self, document: Document, key: Key = ()) -> None:
        self.document, self.key = document, key
        values: Any = document.data
        for part in key:
            values = values[part]
        if not isinstance(values, dict):
            raise Part(document, key[:-1]).error(key[-1], values, "a table is needed")
        self._values: dict[str, Any] = values
        self._asked: set[str] = set()

    def error(self, key: str, value: object, allowed: str) -> InputError:
        """The error that names file, line and key."""
        path = (*self.key, key) if key else self.key
        line = self.document.line(path)
        return InputError(f"{self.document.file}, line {line}, key '{'.'.join(path)}'", value, allowed)

    def keys(self) -> list[str]:
        """Keys as they stand in the file."""
        return list(self._values)

    def has(self, key: str) -> bool:
        """Whether the key is there."""
        self._asked.add(key)
        return key in self._values

    def take(self, key: str) -> Any:
        """The value, of any type; an error if it is missing."""
        if not self.has(key):
            raise self.error(key, "missing", f"there are: {', '.join(self._values) or 'no keys'}")
        return self._values[key]

    def text(self, key: str, default: str | None = None) -> str:
        """A string that says something."""
        if default is not None and not self.has(key):
            return default
        value = self.take(key)
        if not isinstance(value, str) or not value.strip():
            raise self.error(key, value, "a string in quotes that is not empty is needed")
        return value.strip()

    def choice(self, key: str, options: Sequence[str], default: str | None = None) -> str:
        """One of some strings."""
        value = self.text(key, default)
        if value not in options:
            raise self.error(key, value, f"{hint(value, options)}known: {', '.join(options)}")
        return value

    def inside(self, key: str) -> Part:
        """The table under a key."""
        self.take(key)
        return Part(self.document, (*self.key, key))

    def read(self, key: str, kind: str) -> Any:
        """A value of one of the :data:`READERS`."""
        return READERS[kind](self, key, self.take(key))

    def done(self) -> None:
        """Fail on keys that nobody asked for."""
        for key in self._values:
            if key not in self._asked:
                known = sorted(self._asked)
                raise self.error(key, "unknown key", f"{hint(key, known)}known: {', '.join(known)}")


def _flag(part: Part, key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise part.error(key, value, "true or false is needed")
    return value


def _number(part: Part, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise part.error(key, value, "a finite number is needed")
    return float(value)


def _whole(part: Part, key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise part.error(key, value, "a whole number is needed")
    return value


def _text(part: Part, key: str, value: Any) -> str:
    return part.text(key)


def _grid(item: Callable[[Part, str, Any], Any], ranges: Callable[[str, str], Any] | None, what: str) -> Any:
    """A reader of one value, a list of at least one, or (for numbers) a range as on the command line."""

    def read(part: Part, key: str, value: Any) -> tuple[Any, ...]:
        if isinstance(value, str) and ranges is not None:
            try:
                return tuple(ranges(value, key))
            except InputError as error:
                raise part.error(key, value, error.allowed) from None
        items = value if isinstance(value, list) else [value]
        if not items:
            raise part.error(key, "an empty grid", f"at least one of {what} is needed")
        for one in items:
            if ranges is None and not (isinstance(one, str) and one.strip()):
                raise part.error(key, value, f"{what} are needed, each in quotes")
            if ranges is not None and (isinstance(one, (bool, str)) or not isinstance(one, (int, float))):
                raise part.error(key, value, f"{what}, or a range such as '64:8192:x2', are needed")
        read_one = [item(part, key, one) for one in items]
        if len(set(read_one)) < len(read_one):
            raise part.error(key, value, "every value once is allowed")
        return tuple(read_one)

    return read


READERS: dict[str, Callable[[Part, str, Any], Any]] = {
    "flag": _flag,
    "number": _number,
    "whole": _whole,
    "text": _text,
    "numbers": _grid(_number, parse_numbers, "numbers"),
    "wholes": _grid(_whole, parse_wholes, "whole numbers"),
    "texts": _grid(lambda part, key, value: value, None, "names"),
}
