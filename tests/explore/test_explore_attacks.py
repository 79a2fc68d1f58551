"""The explorer's server attacked through raw sockets: what is malformed, oversized, slow, or from elsewhere."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest
from made_captures import made

from theory_lab.explore import server as module
from theory_lab.explore.server import MOST_CONNECTIONS, MOST_REQUEST, ExplorerServer, serve_in_background
from theory_lab.explore.session import Session


@pytest.fixture(scope="module")
def server() -> Iterator[ExplorerServer]:
    running = serve_in_background(Session([made()], ["tra"]))
    yield running
    running.shutdown()
    running.server_close()


def connected(server: ExplorerServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=20)


def send(server: ExplorerServer, text: str) -> bytes:
    """Everything that is answered to what is sent, until the server closes."""
    port = server.server_address[1]
    raw = text.replace("HOST", f"127.0.0.1:{port}").replace("TOKEN", server.token).encode("latin-1")
    with connected(server) as wire:
        with contextlib.suppress(OSError):  # it may close before it has read everything
            wire.sendall(raw)
            wire.shutdown(socket.SHUT_WR)
        return received(wire)


def received(wire: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(OSError):
        while part := wire.recv(65536):
            found += part
    return found


def alive(server: ExplorerServer) -> bool:
    return send(server, "GET /TOKEN/ HTTP/1.1\r\nHost: HOST\r\n\r\n").startswith(b"HTTP/1.1 200 ")


ATTACKS = {
    "no host": ("GET /TOKEN/ HTTP/1.1\r\n\r\n", 403),
    "two hosts": ("GET /TOKEN/ HTTP/1.1\r\nHost: HOST\r\nHost: evil.example\r\n\r\n", 403),
    "another host": ("GET /TOKEN/ HTTP/1.1\r\nHost: evil.example\r\n\r\n", 403),
    "an absolute address": ("GET http://evil.example/TOKEN/ HTTP/1.1\r\nHost: evil.example\r\n\r\n", 403),
    "no token": ("GET / HTTP/1.1\r\nHost: HOST\r\n\r\n", 403),
    "a wrong token": ("GET /TOKENx/meta HTTP/1.1\r\nHost: HOST\r\n\r\n", 403),
    "a page of elsewhere": ("GET /TOKEN/meta HTTP/1.1\r\nHost: HOST\r\nOrigin: http://evil.example\r\n\r\n", 403),
    "no origin at all": ("GET /TOKEN/meta HTTP/1.1\r\nHost: HOST\r\nOrigin: null\r\n\r\n", 403),
    "a script of elsewhere": ("GET /TOKEN/page.js HTTP/1.1\r\nHost: HOST\r\nSec-Fetch-Site: cross-site\r\n\r\n", 403),
    "another port": ("GET /TOKEN/meta HTTP/1.1\r\nHost: HOST\r\nSec-Fetch-Site: same-site\r\n\r\n", 403),
    "the first version": ("GET /TOKEN/\r\n\r\n", 403),
    "the first version by name": ("GET /TOKEN/nothing HTTP/0.9\r\nHost: HOST\r\n\r\n", 404),
    "a version to come": ("GET /TOKEN/ HTTP/3.0\r\nHost: HOST\r\n\r\n", 505),
    "no request": ("\x00\x01\x02\r\n\r\n", 400),
    "another method": ("POST /TOKEN/ HTTP/1.1\r\nHost: HOST\r\n\r\n", 501),
    "a websocket": ("GET /TOKEN/ws HTTP/1.1\r\nHost: HOST\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n", 404),
    "a body": ("GET /TOKEN/meta HTTP/1.1\r\nHost: HOST\r\nContent-Length: 5\r\n\r\nhello", 413),
    "pieces of a body": ("GET /TOKEN/meta HTTP/1.1\r\nHost: HOST\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 413),
    "a long address": ("GET /TOKEN/" + "a" * 9000 + " HTTP/1.1\r\nHost: HOST\r\n\r\n", 414),
    "long headers": ("GET /TOKEN/ HTTP/1.1\r\nHost: HOST\r\n" + ("X: " + "a" * 8000 + "\r\n") * 8 + "\r\n", 431),
    "many headers": ("GET /TOKEN/ HTTP/1.1\r\nHost: HOST\r\n" + "X: a\r\n" * 150 + "\r\n", 431),
    "many words": ("GET /TOKEN/map?" + "a=1&" * 100 + " HTTP/1.1\r\nHost: HOST\r\n\r\n", 400),
    "half of an escape": ("GET /TOKEN/map?pane=%ff%f HTTP/1.1\r\nHost: HOST\r\n\r\n", 400),
    "a broken address": ("GET http://[::1/TOKEN/ HTTP/1.1\r\nHost: HOST\r\n\r\n", 400),
    "folders up": ("GET /TOKEN/../../../../etc/passwd HTTP/1.1\r\nHost: HOST\r\n\r\n", 404),
    "folders up, escaped": ("GET /TOKEN/%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nHost: HOST\r\n\r\n", 404),
    "folders up, backwards": ("GET /TOKEN/..\\..\\etc\\passwd HTTP/1.1\r\nHost: HOST\r\n\r\n", 404),
    "the end of a text": ("GET /TOKEN/page.js%00.html HTTP/1.1\r\nHost: HOST\r\n\r\n", 404),
    "a layer of 2^40": ("GET /TOKEN/thumbnails?pane=p0&layer=1099511627776&size=8 HTTP/1.1\r\nHost: HOST\r\n\r\n", 400),
}  # fmt: skip


@pytest.mark.parametrize(("text", "status"), ATTACKS.values(), ids=list(ATTACKS))
def test_attack(server: ExplorerServer, text: str, status: int) -> None:
    answer = send(server, text)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer[:200]
    head, _, body = answer.partition(b"\r\n\r\n")
    for line in (
        b"Content-Security-Policy: default-src 'none'",
        b"X-Content-Type-Options: nosniff",
        b"Referrer-Policy: no-referrer",
    ):
        assert line in head
    assert body.count(b"HTTP/1.1") == 0, "a second request was read out of the first"
    assert b"root:" not in body
    assert server.token.encode() not in answer


def test_a_person_may_follow_a_link_to_the_page(server: ExplorerServer) -> None:
    """A page cannot read what opens beside it, and the token was in the link."""
    cross = "Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: navigate\r\nSec-Fetch-Dest: document\r\n"
    assert send(server, f"GET /TOKEN/ HTTP/1.1\r\nHost: HOST\r\n{cross}\r\n").startswith(b"HTTP/1.1 200 ")
    assert send(server, f"GET /TOKEN/meta HTTP/1.1\r\nHost: HOST\r\n{cross}\r\n").startswith(b"HTTP/1.1 403 ")


def test_a_flood_without_an_end_is_cut_off(server: ExplorerServer) -> None:
    with connected(server) as wire:
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 100 * MOST_REQUEST:
                wire.sendall(b"X: " + b"a" * 997)
                sent += 1000
        assert sent < 100 * MOST_REQUEST
    assert alive(server)


def test_a_slow_request_is_ended(server: ExplorerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte now and then would keep a connection for ever if each had a time of its own."""
    monkeypatch.setattr(module, "LONGEST_REQUEST", 0.5)
    began = time.monotonic()
    with connected(server) as wire:
        with contextlib.suppress(OSError):
            for letter in b"GET /aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa":
                wire.sendall(bytes([letter]))
                time.sleep(0.1)
        assert received(wire) == b""
    assert time.monotonic() - began < 20
    assert alive(server)


def test_too_many_connections_are_closed_and_the_others_answered(server: ExplorerServer) -> None:
    silent = [connected(server) for _ in range(MOST_CONNECTIONS + 10)]
    try:
        time.sleep(0.5)
        closed = 0
        for wire in silent:
            wire.settimeout(0.05)
            try:
                closed += wire.recv(1) == b""
            except ConnectionError:
                closed += 1
            except TimeoutError:
                pass
        assert closed >= 10
    finally:
        for wire in silent:
            wire.close()
    end = time.monotonic() + 20
    while not alive(server):
        assert time.monotonic() < end
        time.sleep(0.1)


def test_the_token_is_compared_in_constant_time(server: ExplorerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request compares it, by the one function whose time does not tell how much was right."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(first: bytes, second: bytes) -> bool:
        compared.append((first, second))
        return first == second

    monkeypatch.setattr(module.hmac, "compare_digest", compare)
    send(server, "GET /wrong/ HTTP/1.1\r\nHost: HOST\r\n\r\n")
    assert compared == [(b"wrong", server.token.encode())]
