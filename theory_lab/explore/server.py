"""The explorer as a page on this machine: loopback only, behind a token in its address.

Whoever knows the token may look; a page of another site can neither guess it nor reach the server under another name
(the Host header is checked), nor ask from where it is (Origin and Sec-Fetch-Site), and nothing the page loads comes
from elsewhere (Content-Security-Policy). A request has a largest size and a longest time, and so many connections are
open at once; what goes beyond is closed. There is no option to listen on another address.
"""

from __future__ import annotations

import errno
import hmac
import io
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from theory_lab.errors import InputError
from theory_lab.explore import static_files
from theory_lab.explore.session import Session
from theory_lab.outside import one_line

HOST = "127.0.0.1"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_QUESTIONS = ("meta", "map", "pair", "thumbnails")
#: Bytes of a request with its headers, and of its address; words of a question.
MOST_REQUEST, _MOST_ADDRESS, _MOST_WORDS = 1 << 15, 1 << 13, 32
#: Seconds within which a request must be complete once it has begun, a silent connection is kept, an answer is taken.
LONGEST_REQUEST, _LONGEST_SILENCE, _LONGEST_ANSWER = 10.0, 60.0, 60.0
#: Connections at a time; a browser keeps six.
MOST_CONNECTIONS = 32


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
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, port: int = 0, token: str | None = None) -> None:
        if not 0 <= port <= 65535:
            raise InputError("port", port, "0 (any free one) to 65535 is allowed")
        self.token = secrets.token_urlsafe(24) if token is None else token
        self.session: Session | None = None
        self._places = threading.BoundedSemaphore(MOST_CONNECTIONS)
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

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, or close the connection if there are too many."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and make room for another connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

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


class _Reader(io.RawIOBase):
    """What a connection sends, as long as a request is neither too large nor too slow."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.begin()

    def begin(self) -> None:
        """Wait for another request."""
        self._taken, self._end = 0, None

    _end: float | None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = _LONGEST_SILENCE if self._end is None else self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        count = self._connection.recv_into(buffer)
        if self._end is None:
            self._end = time.monotonic() + LONGEST_REQUEST
        self._taken += count
        return count

    @property
    def too_large(self) -> bool:
        """Whether more has been sent than a request may take."""
        return self._taken > MOST_REQUEST


class _Lines(io.BufferedReader):
    """Lines of a request; none after it has become too large."""

    def __init__(self, raw: _Reader) -> None:
        super().__init__(raw, 4096)
        self._source = raw

    def readline(self, size: int | None = -1) -> bytes:
        return b"" if self._source.too_large else super().readline(size)


class _Handler(BaseHTTPRequestHandler):
    server: ExplorerServer
    protocol_version = "HTTP/1.1"
    # A request of the first version has no headers, so no Host: it is answered as one of this version without it.
    default_request_version = "HTTP/1.1"
    timeout = _LONGEST_ANSWER
    server_version, sys_version = "theory-lab", ""

    def setup(self) -> None:
        super().setup()
        self._reader = _Reader(self.connection)
        self.rfile = _Lines(self._reader)

    def handle_one_request(self) -> None:
        self._reader.begin()
        super().handle_one_request()

    def parse_request(self) -> bool:
        good = super().parse_request()
        if self.request_version == "HTTP/0.9":  # whoever says so by name would get an answer without headers
            self.request_version, self.close_connection = self.protocol_version, True
        return good

    def do_GET(self) -> None:
        self._answer(*self._respond(), body=True)

    def do_HEAD(self) -> None:
        self._answer(*self._respond(), body=False)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what cannot be understood as everything is answered: one line, behind the same headers."""
        self.close_connection = True
        self.request_version = self.protocol_version  # whatever it called itself: an answer has headers
        said = message or self.responses.get(code, ("it is refused",))[0]
        self._answer(*_error(code, one_line(said, 200)), body=True)

    def _answer(self, status: int, kind: str, content: bytes, body: bool) -> None:
        self.connection.settimeout(_LONGEST_ANSWER)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
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
        refused = self._refused()
        if refused is not None:
            self.close_connection = True
            return refused
        try:
            parts = urlsplit(self.path)
        except ValueError:
            return _error(400, "the address cannot be read")
        token, _, path = parts.path.removeprefix("/").partition("/")
        # Whatever is asked: the time that this takes says nothing of how much of the token was right.
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self.server.token.encode()):
            return _error(403, "the token in the address is wrong: open the address that theory-lab explore printed")
        if not self._asked_from_here(path):
            return _error(403, "a page of elsewhere may not ask")
        if parts.path == f"/{token}":
            return _error(404, "there is no such page; the explorer's address ends with a slash")
        if path in _QUESTIONS:
            try:
                words = dict(parse_qsl(parts.query, max_num_fields=_MOST_WORDS))
            except ValueError:
                return _error(400, f"at most {_MOST_WORDS} words are allowed in a question")
            return self._ask(path, words)
        try:
            content, kind = static_files.read(path or "index.html")
        except KeyError:
            return _error(404, "there is no such page")
        return 200, kind, content

    def _refused(self) -> tuple[int, str, bytes] | None:
        """What is refused before anything is looked at."""
        if self._reader.too_large:
            return _error(431, f"a request has at most {MOST_REQUEST:,} bytes")
        if len(self.path) > _MOST_ADDRESS:
            return _error(414, f"an address has at most {_MOST_ADDRESS:,} characters")
        if self.headers.get("Transfer-Encoding") or self.headers.get("Content-Length", "0").strip() != "0":
            return _error(413, "a question has no body")  # which would be taken for the next request
        port = self.server.server_address[1]
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or hosts[0] not in (f"{HOST}:{port}", f"localhost:{port}"):
            return _error(403, "this server answers under its own address only")
        return None

    def _asked_from_here(self, path: str) -> bool:
        """Whether the page itself asks, or a person opens its address; browsers say which."""
        origin, site = self.headers.get("Origin"), self.headers.get("Sec-Fetch-Site", "none")
        if origin is not None and origin != f"http://{self.headers['Host']}":
            return False
        if site in ("none", "same-origin"):
            return True
        opened = (self.headers.get("Sec-Fetch-Mode"), self.headers.get("Sec-Fetch-Dest")) == ("navigate", "document")
        return opened and path == ""

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
            said = one_line(error, 200)
            return _error(500, f"internal error ({type(error).__name__}: {said}); please report it")
        return 200, "application/octet-stream", packed(header, numbers)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: the token is in them."""


def packed(header: dict[str, Any], numbers: Any) -> bytes:
    """The header's size (4 bytes, little-endian), the header as JSON, and the numbers as float32."""
    text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    return struct.pack("<I", len(text)) + text + numbers.astype("<f4").tobytes()


def _error(status: int, line: str) -> tuple[int, str, bytes]:
    return status, "application/json", json.dumps({"error": line}).encode()
