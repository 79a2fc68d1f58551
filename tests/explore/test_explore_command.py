"""``theory-lab explore``: what is wrong is said in one line, before a model is loaded."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

pytest.importorskip("transformers")

from theory_lab.cli import execute
from theory_lab.commands.explore import command
from theory_lab.errors import InputError


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that is in use."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_port_in_use_is_one_line(taken: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["explore", "--port", str(taken)]) == 2
    out, err = capsys.readouterr()
    assert err == f"theory-lab: error: port: {taken}; it is in use: choose another, or leave --port out\n"
    assert not out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--as", "soft"], "as: soft; "),
        (["--text", "none.txt"], "text: none.txt; not found: name an existing text file, or - for standard input"),
        (["--port", "1.5"], "port: 1.5; a whole number is allowed"),
        (["--port", "70000"], "port: 70000; 0 (any free one) to 65535 is allowed"),
        (["--length", "many"], "length: many; "),
        (["no-such-model"], "model: no-such-model; "),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else None,
)
def test_bad_input_is_named(words: list[str], line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError) as caught:
        command.main(words, standalone_mode=False)
    assert str(caught.value).startswith(line)
