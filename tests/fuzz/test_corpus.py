"""Inputs that once did harm, and a few of every target, under the guard of the fuzzer."""

from __future__ import annotations

import os
import pickle
import subprocess
from collections.abc import Iterator
from pathlib import Path

import fuzz_harness as harness
import pytest
from fuzz_targets import TARGETS

CORPUS = harness.corpus(Path(__file__).parent / "corpus")
BY_NAME = {target.name: target for target in TARGETS}
#: Those whose every input takes a good part of a second; ``make fuzz`` runs them.
SLOW = (
    "model-load",
    "gguf-convert",
    "pictures",
    "report-folder",
    "report-rows",
    "store-results",
    "store",
    "command-line",
)


@pytest.fixture(scope="module")
def place() -> Iterator[harness.Place]:
    harness.warm()
    with harness.workshop() as made:
        yield made


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "target", "value"), CORPUS, ids=[name for name, _, _ in CORPUS])
def test_what_once_did_harm(name: str, target: str, value: object, place: harness.Place) -> None:
    tally = harness.Tally(target)
    found = harness.run_one(BY_NAME[target], value, place, tally, 0)
    assert found is None, f"{found.kind}: {found.words} [{found.where}]"
    assert tally.inputs == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", [t for t in TARGETS if t.name not in SLOW], ids=lambda target: target.name)
def test_a_few_of_every_target(target: harness.Target, place: harness.Place) -> None:
    """Twenty inputs of a seed of their own: enough to see that a target runs, and that it can refuse."""
    tally = harness.Tally(target.name)
    for index in range(20):
        found = harness.run_one(target, target.make(harness.seeded(target.name, 2026, index)), place, tally, index)
        assert found is None, f"#{index} {found.kind}: {found.words} [{found.where}]"
    assert tally.taken + tally.refused == 20


def test_the_same_number_gives_the_same_input() -> None:
    for target in TARGETS:
        if target.name in ("words", "tasks", "scores-npy", "plan-toml", "header-safetensors", "explorer-bytes"):
            first, second = (target.make(harness.seeded(target.name, 3, 17)) for _ in range(2))
            assert first == second
            assert harness.decoded(harness.encoded(first)) == (list(first) if isinstance(first, tuple) else first)


def _writes_elsewhere(value: object, place: harness.Place) -> None:
    (place.root / "elsewhere").write_text("x", encoding="utf-8")


def _follows_a_link(value: object, place: harness.Place) -> None:
    (place.out / "link").symlink_to(place.root)
    (place.out / "link" / "elsewhere").write_text("x", encoding="utf-8")


def _starts_a_process(value: object, place: harness.Place) -> None:
    subprocess.run(["true"], check=False)


def _unpickles(value: object, place: harness.Place) -> None:
    try:
        pickle.loads(b"cos\ngetcwd\n(tR.")
    except Exception:
        return


def _runs_code_that_was_given(value: object, place: harness.Place) -> None:
    path = place.given / "evil.py"
    path.write_text("x = 1\n", encoding="utf-8")
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), {})


def _takes_for_ever(value: object, place: harness.Place) -> None:
    while True:
        pass


def _takes_all_memory(value: object, place: harness.Place) -> None:
    harness.limit_memory(64 << 20)
    try:
        bytearray(1 << 30)
    finally:
        harness.free_memory()


def _panics(value: object, place: harness.Place) -> None:
    raise type("PanicException", (BaseException,), {})("index out of bounds")


def _says_two_lines(value: object, place: harness.Place) -> str:
    return "one\ntwo"


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        (_writes_elsewhere, "forbidden"), (_follows_a_link, "forbidden"), (_starts_a_process, "forbidden"),
        (_unpickles, "forbidden"),
        (_runs_code_that_was_given, "forbidden"), (_takes_for_ever, "hang"), (_takes_all_memory, "memory"),
        (_panics, "PanicException"), (_says_two_lines, "message"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)  # fmt: skip
def test_the_guard_sees(run: object, kind: str, place: harness.Place) -> None:
    """A harness that cannot fail would find nothing in whatever it runs."""
    short = harness.limited.__wrapped__.__defaults__
    harness.limited.__wrapped__.__defaults__ = (0.3, 60.0)
    try:
        found = harness.run_one(harness.Target("x", lambda rng: b"", run), b"", place, harness.Tally("x"), 0)  # type: ignore[arg-type]
    finally:
        harness.limited.__wrapped__.__defaults__ = short
    assert found is not None
    assert found.kind == kind
    assert not os.path.exists(place.root / "elsewhere")
