"""Inputs that strangers might supply: hostile words and numbers, damaged bytes, documents with one thing wrong."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

WORDS = (
    "", " ", ".", "..", "/", "-", "--", "-1", "0", "1", "2", "64", "1.5", "1e3", "1e309", "-0", "nan", "NaN", "inf", "-inf",
    "1e-400", "2^20", "2^-1", "2^2^2", "0^-1", "(-8)^(1/3)", "-8^0.5", "10^400", "9" * 40, "9" * 5000, "1" + "0" * 4400,
    "1:2:x2", "1:9:+2", "2:2^20:x1.0000001", "1:1e300:+1e-300", "0:0:+1", "5:1:x2", "1:2", "1:2:3", "::", ",", ",,1", "1,2,4",
    "../../evil", "/etc/passwd", "a/../../b", "~root/x", "~", "${HOME}", "$(id)", "`id`", "%s%n%x", "{0.__class__}",
    "file:/dev/zero", "file:/dev/stdin", "file:nothing.npy", "file:,raw", "model:../../etc", "model:softmax-pico", "model:,",
    "gaussian", "student-t:3", "student-t(nan)", "student-t(inf)", "beta:1e308", "beta:1e-300", "truncated-normal:0",
    "two-point", "two-point(1,2,3)", "any", "tda-4.3", "tda-4.6", "tda-9", "tda:beta=0.8", "tra:beta=nan", "eta:tau=1,tau=2",
    "entmax:alpha=1", "recall:queries=8", "recall:queries=1e9", "copy:length=-1", "passkey:tokenizer=/etc/passwd",
    "<script>alert(1)</script>", "\"><img src=x onerror=alert(1)>", "' onmouseover='x", "]]>", "<!--", "&#x3c;script&#x3e;",
    "=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(1+1)", "\t=1", "\r=1", "=HYPERLINK(\"http://x\")", "＝1+1", "'=1",
    "$\\frac{$", "$x$", "$\\sqrt", "\\input{/etc/passwd}", "\\", "_{", "^", "#1", "%",
    "[/red]", "[bold]", "[link=http://x]y[/link]", "[@click=x]y[/]", "\x1b[2J", "\x1b]0;owned\x07", "\x9b31m", "\x00", "\x07\x08",
    "\n", "\r\n", "a\nb", "\u2028", "\u202egnp.exe", "\u200b", "\ufeff", "\ud800", "\udcff", "é", "中文", "😀", "²", "١٢", "½",
    "A" * 300, "é" * 4000, "x" * 100_000, "true", "false", "null", "None", "__proto__", "__class__", "constructor", "con", "nul",
)  # fmt: skip

NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 7, 16, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64,
    -(2**31), -(2**63), 10**9, 10**12, 10**30, 0.0, -0.0, 0.5, 1.5, 1e-320, 1e308, -1e308, math.nan, math.inf, -math.inf, True,
    False, None,
)  # fmt: skip

#: Written into bytes wherever it may hurt.
SPLINTERS: tuple[bytes, ...] = (
    b"\x00", b"\xff", b"\xff" * 8, b"\x00" * 8, b"\x7f" + b"\xff" * 7, b"\x80" + b"\x00" * 7, b"NaN", b"Infinity", b"1e999",
    b"-1", b"0", b"9" * 30, b"9" * 5000, b'"', b"'", b"{", b"}", b"[", b"]", b"[" * 2000, b'{"a":' * 2000, b"\\u0000", b"\\ud800",
    b"\n", b"\r", b"\t", b",", b";", b"#", b"=", b"\x93NUMPY", b"PK\x03\x04", b"PAR1", b"GGUF", b"\x80\x04\x95", b"cos\nsystem\n",
    b"..", b"/", b"../../../evil", b"\xef\xbb\xbf", b"\xff\xfe", b"<", b">", b"<script>", b"&", b"%00", b"\x1b[2J",
)  # fmt: skip


def word(rng: random.Random) -> str:
    """A hostile word, or two of them, or a random one."""
    pick = rng.random()
    if pick < 0.75:
        return rng.choice(WORDS)
    if pick < 0.9:
        return rng.choice(WORDS)[:200] + rng.choice(("", ":", ",", "=", "/", "^")) + rng.choice(WORDS)[:200]
    return "".join(
        chr(rng.choice((rng.randrange(32, 127), rng.randrange(0x250), rng.randrange(0xD7FF))))
        for _ in range(rng.randrange(12))
    )


def number(rng: random.Random) -> Any:
    """A number that may hurt."""
    return rng.choice(NUMBERS) if rng.random() < 0.8 else rng.choice((rng.randrange(-5, 100), rng.uniform(-2, 2)))


def value(rng: random.Random, depth: int = 0) -> Any:
    """Anything that a document may hold."""
    pick = rng.random()
    if pick < 0.4:
        return number(rng)
    if pick < 0.75:
        return word(rng)
    if depth > 2:
        return None
    if pick < 0.88:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {word(rng): value(rng, depth + 1) for _ in range(rng.randrange(3))}


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Bytes with one to four things wrong."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 4))):
        at = rng.randrange(len(changed) + 1) if rng.random() < 0.6 else rng.randrange(min(len(changed), 128) + 1)
        how = rng.randrange(8)
        if how == 0 and changed:
            changed[min(at, len(changed) - 1)] ^= 1 << rng.randrange(8)
        elif how == 1:
            del changed[at:]
        elif how == 2:
            del changed[at : at + rng.choice((1, 2, 4, 8, 100))]
        elif how == 3:
            changed[at:at] = rng.choice(SPLINTERS)
        elif how == 4:
            piece = rng.choice(SPLINTERS)
            changed[at : at + len(piece)] = piece
        elif how == 5:
            whole = rng.choice([n for n in NUMBERS if type(n) is int and 0 <= n < 2**64])
            form = rng.choice(("<I", "<Q", ">I", "<H"))
            changed[at : at + struct.calcsize(form)] = struct.pack(form, whole & (256 ** struct.calcsize(form) - 1))
        elif how == 6:
            end = at + rng.randrange(1, 64)
            changed[at:at] = changed[at:end] * rng.choice((1, 2, 50))
        else:
            changed[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 16)))
    return bytes(changed)


def altered(rng: random.Random, tree: Any, fresh: Callable[[random.Random], Any] = value) -> Any:
    """A copy of a JSON-like value with one to three places replaced, left out, renamed or repeated."""
    tree = json.loads(json.dumps(tree)) if isinstance(tree, (dict, list)) else tree
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places: list[tuple[Any, Any]] = []
        _places(tree, places)
        if not places:
            return fresh(rng)
        holder, key = rng.choice(places)
        how = rng.randrange(8)
        if how < 5:
            holder[key] = fresh(rng)
        elif how == 5:
            del holder[key]
        elif isinstance(holder, dict):
            holder[word(rng)] = holder[key] if how == 6 else fresh(rng)
        else:
            holder.append(fresh(rng))
    return tree


def _places(tree: Any, found: list[tuple[Any, Any]]) -> None:
    items: Any = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, inner in items:
        found.append((tree, key))
        _places(inner, found)


def as_json(rng: random.Random, tree: Any) -> bytes:
    """The value as JSON, now and then damaged, nested beyond measure or with a key twice."""
    text = json.dumps(tree, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    pick = rng.random()
    if pick < 0.1:
        return damaged(rng, text)
    if pick < 0.12:
        return text.replace(b"1", b"9" * 5000, 1)
    if pick < 0.14:
        depth = rng.choice((500, 5000, 100_000))
        return text.replace(b":", b":" + b"[" * depth + b"]" * depth + b"," + b'"x":', 1)
    if pick < 0.16 and text.startswith(b"{") and len(text) > 2:
        return text[:-1] + b"," + text[1:]
    return text


def as_toml(tree: dict[str, Any], path: tuple[str, ...] = ()) -> str:
    """The value as TOML: plain keys first, then tables."""
    lines, tables = [], []
    for key, inner in tree.items():
        if isinstance(inner, dict):
            tables.append((key, inner))
        else:
            lines.append(f"{_string(key)} = {_toml_value(inner)}")
    head = "[" + ".".join(_string(part) for part in path) + "]\n" if path else ""
    return head + "\n".join(lines) + "\n" + "".join(as_toml(inner, (*path, key)) for key, inner in tables)


def crowded(rng: random.Random, text: bytes) -> bytes:
    """The TOML text with keys of many parts, many statements, or both, in front of it or at its end."""
    parts = rng.choice((2, 31, 32, 33, 500, 20_000))
    key, count = b".".join([rng.choice((b"a", b"'a'", b"1"))] * parts), rng.choice((1, 300, 5000))
    more = rng.choice((b"", b"[%b]\n" % key, b"[[%b]]\n" % key))
    line = rng.choice((b"x%d = 1\n", b"[x%d]\n", b"[[x]]\n", b"# %d\n", key[: 400_000 // count] + b".x%d = 1\n"))
    more += b"".join(line.replace(b"%d", b"%d" % number) for number in range(count))
    return more + text if rng.random() < 0.5 else text + b"\n" + more


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=True).replace("\\ud", "\\u0d")  # a surrogate is no TOML


def _toml_value(item: Any) -> str:
    if item is None:
        return '""'
    if isinstance(item, bool):
        return "true" if item else "false"
    if isinstance(item, float):
        return "nan" if item != item else ("inf" if item > 0 else "-inf") if math.isinf(item) else repr(item)
    if isinstance(item, int):
        return str(item)
    if isinstance(item, str):
        return _string(item)
    if isinstance(item, list):
        return "[" + ", ".join(_toml_value(one) for one in item) + "]"
    return "{" + ", ".join(f"{_string(k)} = {_toml_value(v)}" for k, v in item.items()) + "}"


def words_for(rng: random.Random, options: Sequence[tuple[str, Sequence[str] | None]], most: int = 5) -> list[str]:
    """Words of a command line: options (``None``: a flag) with good values half of the time, hostile ones otherwise."""
    line: list[str] = []
    for _ in range(rng.randrange(most + 1)):
        name, good = rng.choice(list(options))
        if good is None:
            line.append(name)
        else:
            text = rng.choice(list(good)) if good and rng.random() < 0.5 else word(rng)
            text = text.replace("\0", "")  # no program can be given one
            line += [name, text] if name and rng.random() < 0.8 else [f"{name}={text}" if name else text]
    return line
