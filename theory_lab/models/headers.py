"""Headers of weight files, read and checked before a library maps or allocates anything that they announce.

A header can lie: sizes beyond the file, tensors on top of each other, a name twice, an array of 2^60 strings. The
readers of gguf and of safetensors differ in what they notice, and when; here nothing is believed that the file does not
bear out.

References
----------
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from theory_lab.errors import InputError
from theory_lab.outside import check_nesting, one_line

#: Bytes of a safetensors header, and of one text in a GGUF file.
_MOST_HEADER, _MOST_TEXT, _MOST_NAME = 100_000_000, 64 << 20, 1 << 16
#: Entries of a GGUF file's metadata, items of all its arrays (vocabularies have some hundred thousand), tensors.
_MOST_ENTRIES, _MOST_ITEMS, _MOST_TENSORS = 100_000, 1 << 24, 1_000_000
_MOST_DIMENSIONS, _MOST_DEPTH = 8, 2

#: Bits of a number by its dtype.
_SAFETENSORS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16), **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64), "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
#: struct's letters of GGUF's scalar types; 8 is a text and 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9


@dataclass(frozen=True)
class Tensor:
    """Name, shape, and the bytes ``begin`` to ``end`` after the header."""

    name: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def elements(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """What a weight file holds.

    Attributes
    ----------
    tensors : tuple of Tensor
    metadata : dict
        Scalars and texts; of an array its number of items.
    """

    tensors: tuple[Tensor, ...]
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def elements(self) -> int:
        """Numbers in all tensors."""
        return sum(tensor.elements for tensor in self.tensors)


def read_safetensors(path: Path) -> Header:
    """Read and check the header of a safetensors file.

    Raises
    ------
    InputError
        If it cannot be read, or says what cannot be.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > min(_MOST_HEADER, size - 8):
                raise _bad(path, f"its header has {length:,} bytes, and the file {size:,}")
            raw = file.read(length)
    except OSError as error:
        raise _bad(path, f"it cannot be read ({error.strerror or error})") from None
    try:
        found = json.loads(raw, object_pairs_hook=_once)
        check_nesting(found)
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"its header is no JSON object of tensors ({one_line(error, 120)})") from None
    if not isinstance(found, dict):
        raise _bad(path, "its header is no JSON object of tensors")
    metadata = found.pop("__metadata__", {})
    tensors = tuple(_entry(path, name, about, size - 8 - length) for name, about in found.items())
    _check_apart(path, tensors)
    return Header(tensors, metadata if isinstance(metadata, dict) else {})


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name twice")
    return found


def _entry(path: Path, name: str, about: Any, room: int) -> Tensor:
    if not isinstance(about, dict) or not {"dtype", "shape", "data_offsets"} <= about.keys():
        raise _bad(path, f"its tensor '{name[:80]}' has no dtype, shape and data_offsets")
    shape, offsets, dtype = about["shape"], about["data_offsets"], about["dtype"]
    if not isinstance(dtype, str) or dtype not in _SAFETENSORS:
        raise _bad(path, f"its tensor '{name[:80]}' has the unknown dtype {one_line(dtype, 40)}")
    for value, length in ((shape, None), (offsets, 2)):
        wholes = isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)
        if not wholes or len(value) not in (range(_MOST_DIMENSIONS + 1) if length is None else (length,)):
            raise _bad(path, f"its tensor '{name[:80]}' has the shape or offsets {one_line(value, 60)}")
    begin, end = offsets
    if not begin <= end <= room:
        raise _bad(
            path, f"its tensor '{name[:80]}' lies at {begin:,} to {end:,}, and the file has {room:,} bytes of data"
        )
    if math.prod(shape) * _SAFETENSORS[dtype] != 8 * (end - begin):
        raise _bad(path, f"its tensor '{name[:80]}' has {end - begin:,} bytes, which its shape and dtype do not take")
    return Tensor(name, tuple(shape), begin, end)


def _check_apart(path: Path, tensors: tuple[Tensor, ...]) -> None:
    last = 0
    for tensor in sorted(tensors, key=lambda one: (one.begin, one.end)):
        if tensor.begin < last:
            raise _bad(path, f"its tensor '{tensor.name[:80]}' lies on top of another")
        last = max(last, tensor.end)


def read_gguf(path: Path) -> Header:
    """Read and check the header of a GGUF file; needs the gguf package, which knows the sizes of quantized blocks.

    Raises
    ------
    InputError
        If it cannot be read, or says what cannot be.
    """
    try:
        with open(path, "rb") as file:
            reader = _Reader(path, file, path.stat().st_size)
            return reader.header()
    except OSError as error:
        raise _bad(path, f"it cannot be read ({error.strerror or error})") from None


class _Reader:
    """A GGUF file, read from its beginning; nothing is read whose size was not compared with what is left."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.file, self.left = path, file, size
        self.size = size
        self.items = 0

    def fail(self, what: str) -> InputError:
        return _bad(self.path, f"its GGUF header is damaged: {what}")

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise self.fail(f"{count:,} bytes are announced where {self.left:,} are left")
        raw = self.file.read(count)
        if len(raw) < count:
            raise self.fail("it ends too soon")
        self.left -= count
        return raw

    def number(self, letter: str) -> Any:
        form = "<" + letter
        raw = self.take(struct.calcsize(form))
        return struct.unpack(form, raw)[0]

    def text(self, most: int = _MOST_TEXT) -> str:
        length = self.number("Q")
        if length > most:
            raise self.fail(f"a text of {length:,} bytes")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail("a name that is not UTF-8") from None

    def header(self) -> Header:
        if self.take(4) != b"GGUF":
            raise _bad(self.path, "a GGUF file is allowed, and this one does not begin as one does")
        version = self.number("I")
        if version not in (2, 3):
            raise _bad(self.path, f"its GGUF version is {version}; 2 and 3, little-endian, are allowed")
        tensors, entries = self.number("Q"), self.number("Q")
        if tensors > _MOST_TENSORS or entries > _MOST_ENTRIES:
            raise self.fail(f"{tensors:,} tensors and {entries:,} entries of metadata")
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            name = self.text(_MOST_NAME)
            if name in metadata:
                raise self.fail(f"'{name[:80]}' twice")
            metadata[name] = self.value(self.number("I"))
        described = [self.tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self.fail(f"an alignment of {alignment}")
        at = self.size - self.left
        data = -(-at // alignment) * alignment
        found = tuple(self.placed(data, alignment, *about) for about in described)
        if len({one.name for one in found}) < len(found):
            raise self.fail("a tensor's name twice")
        _check_apart(self.path, found)
        return Header(found, metadata)

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY or depth > _MOST_DEPTH:
            raise self.fail(f"a value of type {kind}" if kind != _ARRAY else "arrays in arrays in arrays")
        inner, count = self.number("I"), self.number("Q")
        self.items += count
        if self.items > _MOST_ITEMS:
            raise self.fail(f"arrays of {self.items:,} items")
        if inner in _SCALARS:
            self.take(count * struct.calcsize("<" + _SCALARS[inner]))
        else:
            for _ in range(count):
                self.value(inner, depth + 1)
        return count

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self.text(_MOST_NAME), self.number("I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise self.fail(f"tensor '{name[:80]}' of {dimensions} dimensions")
        shape = tuple(self.number("Q") for _ in range(dimensions))
        return name, shape, self.number("I"), self.number("Q")

    def placed(self, data: int, alignment: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> Tensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise self.fail(f"tensor '{name[:80]}' of the unknown type {kind}") from None
        elements = math.prod(shape)
        if elements < 1 or shape[0] % block:
            raise self.fail(f"tensor '{name[:80]}' of the shape {one_line(shape, 60)}")
        end = offset + elements // block * size
        if offset % alignment or data + end > self.size:
            raise self.fail(f"tensor '{name[:80]}' at {offset:,} to {end:,}, beyond the file's end or its alignment")
        return Tensor(name, shape, offset, end)


def _bad(path: Path, what: str) -> InputError:
    return InputError("model", str(path), what)


def counts(config: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """Every whole number of a configuration, and of those nested in it, by its key."""
    if isinstance(config, dict):
        for key, inner in config.items():
            yield from counts(inner, str(key))
    elif isinstance(config, (list, tuple)):
        for inner in config:
            yield from counts(inner, name)
    elif isinstance(config, int) and not isinstance(config, bool):
        yield name, config
