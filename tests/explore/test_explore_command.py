"""``theory-lab explore``: what is wrong is said in one line, before a model is loaded."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

pytest.importorskip("transformers")


def test_help_and_bad_input(cli, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for words, line in (
            (["--port", port], f"port: {port}; it is in use: choose another, or leave --port out"),
            (["--as", "soft"], "as: soft; "),
            (["--text", "none.txt"], "text: none.txt; not found: name an existing text file, or - for standard input"),
        ):
            done = cli("explore", *words)
            assert done.returncode == 2, done.stderr
            assert done.stderr.startswith(f"theory-lab: error: {line}")
            assert done.stderr.count("\n") == 1
            assert not done.stdout
