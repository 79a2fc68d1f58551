"""What the pages of a Parquet file say they hold, before a library sets memory aside for it.

The header of a page lies among the data, and can speak of two gigabytes, which pyarrow sets aside, and fills if the
page is packed so well. Footer and headers are structures of Thrift's compact protocol, by ``parquet.thrift`` of
https://github.com/apache/parquet-format; the few numbers needed are read here, since pyarrow shows no header of a page,
and ends the process over some damage in what the footer says of columns.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any

from theory_lab.outside import read_at_most

#: Bytes of one page, unpacked: writers make pages of a megabyte.
MOST_PAGE = 1 << 28
#: Bytes of the footer, and of a page's header, which may hold the page's least and greatest text.
_MOST_FOOTER, _MOST_HEADER = 1 << 24, 1 << 20
_MOST_DEPTH = 12
_MAGIC = b"PAR1"
#: Of the types of pages those that hold values, and the field that says how many.
_DATA = {0: 5, 3: 8}

_STOP, _TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(13)


def check_pages(source: Path | bytes) -> None:
    """Refuse a Parquet file of which a page says that it holds more than :data:`MOST_PAGE` bytes.

    Raises
    ------
    OSError
        If it cannot be read.
    ValueError
        If it is refused, or damaged so that this cannot be told; one line says why.
    """
    if isinstance(source, bytes):
        import io

        _check(io.BytesIO(source), len(source))
    else:
        with open(source, "rb") as file:
            _check(file, os.fstat(file.fileno()).st_size)


def _check(file: IO[bytes], size: int) -> None:
    file.seek(max(size - 8, 0))
    end = file.read(8)
    length = int.from_bytes(end[:4], "little")
    if end[4:] != _MAGIC or size < 12 or length > size - 12:
        raise ValueError("no Parquet file, or cut short")
    if length > _MOST_FOOTER:
        raise ValueError(f"a footer of {length:,} bytes, and at most {_MOST_FOOTER:,} are allowed")
    file.seek(size - 8 - length)
    footer = _Compact(file.read(length)).struct()
    for group in _list(footer, 4):
        for column in _list(group, 1):
            about = column.get(3) if isinstance(column, dict) else None
            if not isinstance(about, dict):
                raise ValueError("a column without a description")
            # As pyarrow decides where a column begins.
            begin, first = _whole(about, 9), about.get(11)
            if isinstance(first, int) and 0 < first < begin:
                begin = first
            _column(file, begin, begin + _whole(about, 7), _whole(about, 5), size)


def _column(file: IO[bytes], at: int, end: int, values: int, size: int) -> None:
    if not 0 <= at <= end <= size:
        raise ValueError("a column that lies outside of the file")
    seen = 0
    while at < end and seen < values:
        file.seek(at)
        # Few headers are long: those that hold long texts.
        for most in (256, _MOST_HEADER):
            try:
                reader = _Compact(read_at_most(file, min(most, end - at)))
                header = reader.struct()
                break
            except ValueError:
                if most == _MOST_HEADER or most >= end - at:
                    raise
                file.seek(at)
        packed, unpacked = _whole(header, 3), _whole(header, 2)
        if unpacked > MOST_PAGE:
            raise ValueError(f"a page of {unpacked:,} bytes, and at most {MOST_PAGE:,} are allowed")
        if header.get(1) in _DATA:
            seen += _whole(header.get(_DATA[header[1]]), 1)
        at += reader.at + packed
        if at > end:
            raise ValueError("a page that is longer than its column")


def _whole(fields: Any, key: int) -> int:
    value = fields.get(key) if isinstance(fields, dict) else None
    if type(value) is not int or value < 0:
        raise ValueError("a page or column whose size is missing or below 0")
    return value


def _list(fields: Any, key: int) -> list[Any]:
    value = fields.get(key) if isinstance(fields, dict) else None
    if not isinstance(value, list):
        raise ValueError("a footer without its lists")
    return value


class _Compact:
    """Reads Thrift's compact protocol: structures as dictionaries by field number, texts left out."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """The structure that begins here."""
        if depth > _MOST_DEPTH:
            raise ValueError("nested too deep")
        found: dict[int, Any] = {}
        field = 0
        while True:
            head = self._byte()
            kind = head & 15
            if kind == _STOP:
                return found
            field = field + (head >> 4) if head >> 4 else self._signed()
            found[field] = kind == _TRUE if kind in (_TRUE, _FALSE) else self._value(kind, depth)

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (_I16, _I32, _I64):
            return self._signed()
        if kind == _BINARY:
            return self._skip(self._varint())
        if kind in (_BYTE, _TRUE, _FALSE):
            return self._skip(1)
        if kind == _DOUBLE:
            return self._skip(8)
        if kind in (_LIST, _SET):
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._varint()
            self._holds(count)
            return [self._element(head & 15, depth) for _ in range(count)]
        if kind == _MAP:
            count = self._varint()
            self._holds(2 * count)
            kinds = self._byte() if count else 0
            for _ in range(count):
                self._element(kinds >> 4, depth)
                self._element(kinds & 15, depth)
            return None
        if kind == _STRUCT:
            return self.struct(depth + 1)
        raise ValueError(f"a field of type {kind}, which there is not")

    def _element(self, kind: int, depth: int) -> Any:
        if depth > _MOST_DEPTH:
            raise ValueError("nested too deep")
        return self._value(kind, depth + 1)

    def _holds(self, count: int) -> None:
        if count > len(self._data) - self.at:  # every element takes a byte at least
            raise ValueError("a list that is longer than what it is in")

    def _skip(self, count: int) -> None:
        self._holds(count)
        self.at += count

    def _byte(self) -> int:
        if self.at >= len(self._data):
            raise ValueError("cut short")
        self.at += 1
        return self._data[self.at - 1]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a number of more than 64 bits")

    def _signed(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
