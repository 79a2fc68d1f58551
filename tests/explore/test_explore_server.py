"""The explorer's server: who may look, and at what."""

from __future__ import annotations

import http.client
import json
import socket
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from made_captures import made

from theory_lab.errors import InputError
from theory_lab.explore import static_files
from theory_lab.explore.server import ExplorerServer, serve_in_background
from theory_lab.explore.session import Session


@pytest.fixture(scope="module")
def server() -> Iterator[ExplorerServer]:
    running = serve_in_background(Session([made()], ["tra"]))
    yield running
    running.shutdown()
    running.server_close()


def get(server: ExplorerServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def test_every_file_of_the_page_is_served_and_nothing_else(server: ExplorerServer) -> None:
    for name in ("", *static_files.FILES):
        status, headers, content = get(server, f"/{server.token}/{name}")
        assert status == 200
        assert content == static_files.read(name or "index.html")[0]
        assert headers["content-type"].startswith("text/")
    for path in (
        "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/static/explorer.js", "/server.py", "//etc/passwd", "/map/x",
        "/..%5c..%5cpyproject.toml",
    ):  # fmt: skip
        status, _, content = get(server, f"/{server.token}{path}")
        assert status == 404, path
        assert json.loads(content)["error"] == "there is no such page"
    assert get(server, f"/{server.token}")[0] == 404


def test_a_wrong_token_is_refused_whatever_is_asked(server: ExplorerServer) -> None:
    wrong = server.token[:-1] + ("a" if server.token[-1] != "a" else "b")
    for path in ("/", "/explorer.js", f"/{wrong}/", f"/{wrong}/meta", f"/{server.token}x/", "/%00/", "/%c3%bc/"):
        status, _, content = get(server, path)
        assert status == 403, path
        assert "token" in json.loads(content)["error"]
        assert server.token.encode() not in content


def test_another_host_name_is_refused(server: ExplorerServer) -> None:
    """A page of elsewhere whose name was made to lead here (DNS rebinding) has the wrong Host."""
    port = server.server_address[1]
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", "127.0.0.1:1"):
        assert get(server, f"/{server.token}/", Host=host)[0] == 403, host
    assert get(server, f"/{server.token}/", Host=f"localhost:{port}")[0] == 200


def test_headers_shut_the_page_in(server: ExplorerServer) -> None:
    for path in (f"/{server.token}/", f"/{server.token}/meta", "/wrong/"):
        _, headers, _ = get(server, path)
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == "'none'"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers
        assert "Python" not in headers["server"]
    page = static_files.read("index.html")[0].decode()
    assert page.count("<script") == page.count("src=") == 1
    assert "style=" not in page
    assert "http" not in page


def test_only_loopback_is_listened_on(server: ExplorerServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert server.url == f"http://127.0.0.1:{server.server_address[1]}/{server.token}/"


def test_a_map_comes_as_numbers(server: ExplorerServer) -> None:
    assert server.session is not None
    words = "pane=p1&layer=1&head=0&rows=0,60&columns=0,60&resolution=20&reduce=max&quality=quick"
    status, headers, content = get(server, f"/{server.token}/map?{words}")
    assert (status, headers["content-type"]) == (200, "application/octet-stream")
    (size,) = struct.unpack("<I", content[:4])
    header = json.loads(content[4 : 4 + size])
    image = np.frombuffer(content[4 + size :], "<f4").reshape(header["shape"])
    np.testing.assert_array_equal(image, server.session.captures[0].map(1, 0, resolution=20, as_="tra").image)


def test_bad_questions_are_one_line(server: ExplorerServer) -> None:
    for path, status in (("map?pane=zz", 400), ("map", 400), ("thumbnails?pane=p0&layer=a", 400), ("map?%ff=%ff", 400)):
        got, _, content = get(server, f"/{server.token}/{path}")
        assert got == status, path
        assert "\n" not in json.loads(content)["error"]


def test_a_bug_is_one_line_and_the_server_goes_on(server: ExplorerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(server.session, "answer", fails)
        status, _, content = get(server, f"/{server.token}/meta")
    assert status == 500
    assert json.loads(content)["error"] == "internal error (RuntimeError: broken); please report it"
    assert get(server, f"/{server.token}/meta")[0] == 200


def test_other_methods(server: ExplorerServer) -> None:
    status, _, content = get(server, f"/{server.token}/", method="HEAD")
    assert (status, content) == (200, b"")
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert get(server, f"/{server.token}/", method=method)[0] == 501


def test_before_the_model_is_there(server: ExplorerServer) -> None:
    kept, server.session = server.session, None
    try:
        assert get(server, f"/{server.token}/meta")[0] == 503
    finally:
        server.session = kept


def test_ports() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError) as caught:
            ExplorerServer(port)
        assert str(caught.value) == f"port: {port}; it is in use: choose another, or leave --port out"
    with pytest.raises(InputError, match="any free one"):
        ExplorerServer(70000)
    first, second = ExplorerServer(), ExplorerServer()
    try:
        assert len(first.token) >= 32
        assert first.token != second.token
    finally:
        first.server_close()
        second.server_close()
