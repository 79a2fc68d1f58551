"""The explorer as a page on this machine: loopback only, behind a token in its address.

Whoever knows the token may look; a page of another site can neither guess it nor reach the server under another name
(the Host header is checked), and nothing the page loads comes from elsewhere (Content-Security-Policy).
"""

from __future__ import annotations

import errno
import hmac
import json
import secrets
import struct
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from theory_lab.errors import InputError
from theory_lab.explore import static_files
from theory_lab.explore.session import Session

HOST = "127.0.0.1"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_QUESTIONS = ("meta", "map", "pair", "thumbnails")


class ExplorerServer(ThreadingHTTPServer):
    """Answers on ``http://127.0.0.1:PORT/TOKEN/``.

    Parameters
    ----------
    port : int
        0 takes any free one.
    token : str, optional
        A fresh random one by default.

    Raises
    ------
    InputError
        If the port is in use or not allowed.

    Notes
    -----
    The address is taken at once, before a model is loaded: a port in use shows in time. Requests are answered from
    ``session`` on; until it is set they get 503.
    """

    daemon_threads = True
    # On Linux this allows a port whose last connections are still closing, not one that is listened on.
    allow_reuse_address = True

    def __init__(self, port: int = 0, token: str | None = None) -> None:
        if not 0 <= port <= 65535:
            raise InputError("port", port, "0 (any free one) to 65535 is allowed")
        self.token = secrets.token_urlsafe(24) if token is None else token
        self.session: Session | None = None
        try:
            super().__init__((HOST, port), _Handler)
        except PermissionError:
            raise InputError("port", port, "it is not allowed here: choose one above 1023") from None
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise InputError("port", port, f"it cannot be used ({error.strerror})") from None
            raise InputError("port", port, "it is in use: choose another, or leave --port out") from None

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{HOST}:{self.server_address[1]}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer is no event."""


def serve(
    session: Session, port: int = 0, *, ready: Callable[[str], None] | None = None, server: ExplorerServer | None = None
) -> None:
    """Serve a session until interrupted.

    Parameters
    ----------
    session : Session
    port : int
        0 takes any free one; of no effect with ``server``.
    ready : callable, optional
        Gets the page's address.
    server : ExplorerServer, optional
        One that already has its port.

    Raises
    ------
    InputError
        If the port is in use.
    """
    server = ExplorerServer(port) if server is None else server
    server.session = session
    with server:
        if ready is not None:
            ready(server.url)
        server.serve_forever(poll_interval=0.2)


def serve_in_background(session: Session, port: int = 0) -> ExplorerServer:
    """Serve from a thread; ``shutdown()`` and ``server_close()`` end it."""
    server = ExplorerServer(port)
    server.session = session
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    return server


class _Handler(BaseHTTPRequestHandler):
    server: ExplorerServer
    protocol_version = "HTTP/1.1"
    timeout = 60.0
    server_version, sys_version = "theory-lab", ""

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, body: bool) -> None:
        status, kind, content = self._respond()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        for name, value in (
            ("Content-Security-Policy", _POLICY),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Opener-Policy", "same-origin"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def _respond(self) -> tuple[int, str, bytes]:
        port = self.server.server_address[1]
        if self.headers.get("Host", "") not in (f"{HOST}:{port}", f"localhost:{port}"):
            return _error(403, "this server answers under its own address only")
        try:
            parts = urlsplit(self.path)
        except ValueError:
            return _error(400, "the address cannot be read")
        token, _, path = parts.path.removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self.server.token.encode()):
            return _error(403, "the token in the address is wrong: open the address that theory-lab explore printed")
        if parts.path == f"/{token}":
            return _error(404, "there is no such page; the explorer's address ends with a slash")
        if path in _QUESTIONS:
            return self._ask(path, dict(parse_qsl(parts.query)))
        try:
            content, kind = static_files.read(path or "index.html")
        except KeyError:
            return _error(404, "there is no such page")
        return 200, kind, content

    def _ask(self, kind: str, words: dict[str, str]) -> tuple[int, str, bytes]:
        if self.server.session is None:
            return _error(503, "the model is still reading the text")
        try:
            header, numbers = self.server.session.answer(kind, words)
        except InputError as error:
            return _error(400, str(error))
        except MemoryError:
            return _error(507, "out of memory: zoom in, or explore a shorter text")
        except Exception as error:
            # A bug of ours: the page shows it, and the server goes on.
            return _error(500, f"internal error ({type(error).__name__}: {error}); please report it")
        return 200, "application/octet-stream", packed(header, numbers)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: the token is in them."""


def packed(header: dict[str, Any], numbers: Any) -> bytes:
    """The header's size (4 bytes, little-endian), the header as JSON, and the numbers as float32."""
    text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    return struct.pack("<I", len(text)) + text + numbers.astype("<f4").tobytes()


def _error(status: int, line: str) -> tuple[int, str, bytes]:
    return status, "application/json", json.dumps({"error": line}).encode()
