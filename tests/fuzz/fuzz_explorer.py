"""Targets of the explorer: its questions, and whatever bytes reach its server."""

from __future__ import annotations

import functools
import io
import json
import random
import struct
from typing import Any

import fuzz_inputs as make
from fuzz_harness import Place, Target

_QUESTIONS = {
    "meta": {}, "map": {"pane": "p0", "layer": "0", "head": "0", "rows": "0,20", "columns": "0,20", "resolution": "8", "reduce": "max",
                        "quality": "quick"},
    "pair": {"pane": "p1", "layer": "1", "head": "1", "rows": "0,4", "columns": "0,4"},
    "thumbnails": {"pane": "p0", "layer": "0", "size": "16"},
}  # fmt: skip
_WORDS = (
    "0",
    "1",
    "-1",
    "999",
    "2147483648",
    "99999999999",
    "0,0",
    "5,2",
    "0,9999999",
    "p0",
    "p9",
    "max",
    "sum",
    "all",
    "fine",
    "1024",
    "1e3",
)


@functools.cache
def _session() -> Any:
    import torch

    from theory_lab.explore.session import Session
    from theory_lab.probes import Captured

    draw = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(1, 2, 24, 8, generator=draw), torch.randn(1, 2, 24, 8, generator=draw)) for _ in range(2)]
    texts = [word[:30] for word in make.WORDS[:24]]
    return Session([Captured.from_tensors("<script>alert(1)</script>", texts, pairs)], ["tra"])


def _make_question(rng: random.Random) -> list[Any]:
    kind = rng.choice(list(_QUESTIONS))
    words = dict(_QUESTIONS[kind])
    for _ in range(rng.randrange(3)):
        name = rng.choice([*words, make.word(rng)])
        if rng.random() < 0.2:
            words.pop(name, None)
        else:
            words[name] = rng.choice(_WORDS) if rng.random() < 0.6 else make.word(rng)
    return [kind if rng.random() < 0.95 else make.word(rng), [[name, text] for name, text in words.items()]]


def _question(value: list[Any], place: Place) -> None:
    from theory_lab.explore.server import packed

    header, numbers = _session().answer(value[0], dict(value[1]))
    raw = packed(header, numbers)
    size = struct.unpack("<I", raw[:4])[0]
    json.loads(raw[4 : 4 + size])


_GOOD = (
    "GET /TOKEN/ HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\n\r\n",
    "GET /TOKEN/meta HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\nConnection: close\r\n\r\n",
    "GET /TOKEN/map?pane=p0&layer=0&head=0&rows=0,20&columns=0,20&resolution=8&reduce=max&quality=quick HTTP/1.1\r\nHost: localhost:PORT\r\n\r\n",
    "HEAD /TOKEN/explorer.js HTTP/1.0\r\nHost: 127.0.0.1:PORT\r\n\r\n",
)
_LINES = (
    "Host: evil.example", "Host: 127.0.0.1:PORT", "Origin: http://evil.example", "Sec-Fetch-Site: cross-site", "Content-Length: 5",
    "Content-Length: -1", "Content-Length: 99999999999", "Transfer-Encoding: chunked", "Expect: 100-continue", "Connection: keep-alive",
    "Range: bytes=0-", "Upgrade: websocket", "X: " + "a" * 70_000, "bad header", ": empty", "A\0B: c", "Cookie: \r x",
)  # fmt: skip
_PATHS = (
    "/", "//", "/TOKEN", "/TOKEN/../TOKEN/", "/TOKEN/../../etc/passwd", "/TOKEN/%2e%2e/%2e%2e/etc/passwd", "/TOKEN/..%5c..%5cx", "/TOKEN/map?%ff",
    "/TOKEN/\0", "http://evil.example/TOKEN/", "/TOKEN/map?" + "a=1&" * 9000, "/" + "a" * 66_000, "/TOKEN/meta?x[", "//[::1/TOKEN/", "*", "",
    "/TOKEN/page.js%00", "/TOKEN/index.html/", "/TOKEN/static/index.html", "/TOKEN/.", "/token/", "/TOKEN /", "/TOKEN/map?pane=p0&pane=p1",
)  # fmt: skip


def _make_bytes(rng: random.Random) -> bytes:
    text = rng.choice(_GOOD)
    pick = rng.random()
    if pick < 0.3:
        head, _, rest = text.partition(" ")
        text = head + " " + rng.choice(_PATHS) + " " + rest.partition(" ")[2]
    elif pick < 0.6:
        first, _, rest = text.partition("\r\n")
        for _ in range(rng.randrange(1, 4)):
            rest = rng.choice(_LINES) + "\r\n" + rest
        text = first + "\r\n" + rest
    elif pick < 0.7:
        text = (
            rng.choice(("POST", "PUT", "OPTIONS", "TRACE", "CONNECT", "PRI", "", "get", "<script>"))
            + text[text.find(" ") :]
        )
    elif pick < 0.75:
        text = text.replace(
            "HTTP/1.1", rng.choice(("HTTP/0.9", "HTTP/2.0", "HTTP/9999999999.1", "HTTP/1.x", "", "HTTP/1.1 x"))
        )
    if rng.random() < 0.1:
        text = text.replace("TOKEN", rng.choice(("TOKEM", "", "x" * 40, "%54OKEN")), 1)
    raw = text.encode("latin-1", "replace")
    return make.damaged(rng, raw) if rng.random() < 0.4 else raw


class _Wire:
    """A connection in memory: what was sent is there, and what is answered is kept."""

    def __init__(self, sent: bytes) -> None:
        self.sent, self.answer = io.BytesIO(sent), io.BytesIO()

    def recv_into(self, buffer: Any) -> int:
        return self.sent.readinto(buffer)

    def makefile(self, mode: str, *_: Any, **__: Any) -> Any:
        return self.sent if "r" in mode else io.BytesIO()

    def sendall(self, data: bytes) -> None:
        self.answer.write(data)

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class _Server:
    server_address = ("127.0.0.1", 8000)
    token = "TOKEN"


def _bytes(sent: bytes, place: Place) -> None:
    from theory_lab.explore.server import _Handler

    server = _Server()
    server.session = _session()  # type: ignore[attr-defined]
    wire = _Wire(sent.replace(b"PORT", b"8000"))
    _Handler(wire, ("127.0.0.1", 9), server)  # type: ignore[arg-type]
    answer = wire.answer.getvalue()
    assert b"root:x:0" not in answer
    assert not answer or answer.startswith((b"HTTP/1.0 ", b"HTTP/1.1 ")), answer[:60]
    head = answer.partition(b"\r\n\r\n")[0].lower()
    if answer and b" 100 " not in answer[:20]:
        for name in (b"content-security-policy:", b"x-content-type-options: nosniff", b"referrer-policy: no-referrer"):
            assert name in head, f"{name!r} is missing: {answer[:80]!r}"
        assert b"access-control-allow" not in head
    if b" 500 " in answer[:16]:
        raise AssertionError(f"an internal error is answered: {answer[-200:]!r}")


TARGETS = (
    Target("explorer-question", _make_question, _question, 3, heavy=True),
    Target("explorer-bytes", _make_bytes, _bytes, 65, heavy=True),
)
