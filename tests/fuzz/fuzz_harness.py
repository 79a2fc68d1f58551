"""Runs one input after another under guard: what may be read, written, started and used up, and what counts as a finding.

A target turns an input into work: it returns, or raises an error that was made for users. Everything else is a finding:
another exception, five seconds of processor time, more than :data:`MOST_MEMORY` above what the process had before, a file
written outside the folder given for that, a process started, a connection made, a pickle opened, code of an input run,
a message of more than one line or with characters that act on a terminal.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from theory_lab.errors import TheoryLabError

#: Bytes of address space that an input may take beyond what the process has when it begins.
MOST_MEMORY = 1 << 30
#: Seconds of processor time of one input, and of wall-clock time, since what waits uses no processor.
MOST_SECONDS, MOST_WALL = 5.0, 120.0


class Forbidden(BaseException):
    """An input did what none may do; not an Exception, so that no handler takes it for an error of a file."""


class Hang(BaseException):
    """An input took longer than it may."""


@dataclass(frozen=True)
class Place:
    """Folders of one input: ``given`` holds what a stranger supplied, ``out`` is what may be written."""

    root: Path

    @property
    def given(self) -> Path:
        """What the input consists of."""
        return self.root / "given"

    @property
    def out(self) -> Path:
        """The output folder."""
        return self.root / "out"

    def clear(self) -> None:
        """Empty both."""
        for folder in (f"{self.root}/given", f"{self.root}/out"):
            try:
                with os.scandir(folder) as entries:
                    left = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries]
            except OSError:  # gone, or something else has its name
                shutil.rmtree(folder, ignore_errors=True)
                os.makedirs(folder)
                continue
            for path, is_folder in left:
                shutil.rmtree(path, ignore_errors=True) if is_folder else os.unlink(path)
        os.chdir(folder)


@dataclass(frozen=True)
class Target:
    """Something that reads what strangers wrote.

    Attributes
    ----------
    name : str
    make : callable
        Generator of random numbers -> an input: bytes, text, a list of words, or files by name. The same generator
        gives the same input.
    run : callable
        (input, place) -> anything; raises what users may see.
    share : float
        Of a run's inputs, relative to the others: about thousands of a million, fewer for what takes longer.
    limited : bool
        Whether memory is limited; libraries that reserve address space by the terabyte cannot be.
    heavy : bool
        Whether it needs torch, which takes its time to import.
    settled : int
        Inputs after which everything is imported, and memory is limited.
    """

    name: str
    make: Callable[[random.Random], Any]
    run: Callable[[Any, Place], Any]
    share: float = 1.0
    limited: bool = True
    heavy: bool = False
    settled: int = 30


@dataclass
class Finding:
    """An input that did what none may."""

    target: str
    index: int
    kind: str
    words: str
    where: str
    input: Any = field(repr=False, default=None)


@dataclass
class Tally:
    """What became of the inputs of one target."""

    target: str
    inputs: int = 0
    taken: int = 0
    refused: int = 0
    slowest: float = 0.0
    memory: int = 0
    messages: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def line(self) -> str:
        """For people."""
        return (
            f"{self.target:24} {self.inputs:9,} inputs {self.taken:8,} taken {self.refused:8,} refused "
            f"{len(self.messages):5} messages  slowest {self.slowest:5.2f} s  memory +{self.memory / 1e6:5.0f} MB  "
            f"{len(self.findings)} findings"
        )


_ALLOWED: list[str] = []
_GIVEN: list[str] = []
_SEEN: list[str] = []
_STARTS = (
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn", "os.fork", "os.forkpty",
    "pickle.find_class", "socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "webbrowser.open",
)  # fmt: skip
_CHANGES = {
    "os.mkdir": (0,), "os.rmdir": (0,), "os.remove": (0,), "os.rename": (0, 1), "os.link": (1,), "os.symlink": (1,),
    "os.truncate": (0,), "os.chmod": (0,), "os.chown": (0,), "shutil.rmtree": (0,), "os.utime": (0,),
}  # fmt: skip


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if not _ALLOWED:
        return
    if event == "open":
        path, mode, flags = (*arguments, None, None)[:3]
        writes = (isinstance(mode, str) and set(mode) & set("wax+")) or (
            isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        )
        if writes:
            _check(event, path)
    elif event in _CHANGES:
        for place in _CHANGES[event]:
            _check(event, arguments[place])
    elif event == "subprocess.Popen" and list(arguments[1])[:3] in _OWN:
        return
    elif event in _STARTS:
        _forbid(f"{event} {str(arguments)[:120]}")
    elif event in ("ctypes.dlopen", "import"):
        name = str(arguments[0] if event == "ctypes.dlopen" else arguments[1])
        if any(name.startswith(given) for given in _GIVEN):
            _forbid(f"{event} {name}")
    elif event == "exec":
        name = getattr(arguments[0], "co_filename", "")
        if any(name.startswith(given) for given in _GIVEN):
            _forbid(f"code of {name} runs")


def _check(event: str, path: Any) -> None:
    if isinstance(path, int) or path is None:
        return
    name = os.fsdecode(path)
    # What replaces or removes a link leaves alone what the link leads to.
    where = os.path.realpath(name)
    if event in ("os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "shutil.rmtree"):
        where = os.path.join(os.path.realpath(os.path.dirname(os.path.abspath(name))), os.path.basename(name))
    if where != os.devnull and not any(where == one or where.startswith(one + os.sep) for one in _ALLOWED):
        _forbid(f"{event} {where}")


def _forbid(what: str) -> None:
    _SEEN.append(what)
    raise Forbidden(what)


#: Programs that are started whatever an input says: the commit of a checkout, and what completion scripts need to know.
_OWN = (
    ["git", "-C", str(Path(__file__).resolve().parents[2])], ["/usr/bin/bash", "--norc", "-c"], ["/sbin/ldconfig", "-p"],
)  # fmt: skip

_watching = False


@functools.lru_cache(16)
def _places(root: str, *caches: str) -> tuple[tuple[str, ...], str]:
    """What may be written, and what was given, as real paths."""
    return tuple(map(os.path.realpath, (f"{root}/out", f"{root}/given", *caches))), os.path.realpath(f"{root}/given")


@contextlib.contextmanager
def guarded(place: Place) -> Iterator[list[str]]:
    """Forbid changes outside a place and its caches, processes, connections, pickles and code that was given."""
    global _watching
    if not _watching:
        sys.addaudithook(_watch)  # stays for the life of the process, and does nothing outside this block
        _watching = True
    _SEEN.clear()
    caches = [os.environ[name] for name in ("TMPDIR", "THEORY_LAB_CACHE", "MPLCONFIGDIR") if name in os.environ]
    allowed, given = _places(str(place.root), *caches)
    _GIVEN[:] = [given]
    _ALLOWED[:] = allowed
    try:
        yield _SEEN
    finally:
        _ALLOWED.clear()


@contextlib.contextmanager
def limited(seconds: float = MOST_SECONDS, wall: float = MOST_WALL) -> Iterator[None]:
    """Raise :class:`Hang` after so much time; only in the main thread, where signals arrive."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: Any) -> None:
        where = "".join(traceback.format_stack(frame, limit=4)).strip().replace("\n", " | ")
        raise Hang(f"more than {seconds:g} s of processor time ({where[-400:]})")

    before = [signal.signal(number, late) for number in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, seconds)
    other, _ = signal.setitimer(signal.ITIMER_REAL, wall)
    began = time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in zip((signal.SIGPROF, signal.SIGALRM), before, strict=True):
            signal.signal(number, handler)
        if other:  # somebody else's alarm goes on
            signal.setitimer(signal.ITIMER_REAL, max(other - (time.monotonic() - began), 0.01))


def status(name: str) -> int:
    """A size of this process in bytes, such as VmSize or VmRSS."""
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith(name + ":"):
                return int(line.split()[1]) << 10
    return 0


def limit_memory(more: int = MOST_MEMORY) -> None:
    """Let the address space grow by so much from now on."""
    resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + more, resource.RLIM_INFINITY))


def free_memory() -> None:
    """Take the limit away again."""
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


#: Errors that are made for users.
GOOD = (TheoryLabError, click.ClickException, click.exceptions.Exit, click.Abort)


def run_one(target: Target, value: Any, place: Place, tally: Tally, index: int) -> Finding | None:
    """Run one input and count it; what it did wrong, if anything."""
    place.clear()
    began = time.process_time()
    kind = words = where = ""
    message: str | None = None
    with guarded(place) as seen:
        try:
            with limited():
                said = target.run(value, place)
            message = said if isinstance(said, str) else None
            tally.taken += 1
        except GOOD as error:
            message = error.format_message() if isinstance(error, click.ClickException) else str(error)
            tally.refused += 1
        except (KeyboardInterrupt, SystemExit):
            raise
        except Forbidden as error:
            kind, words = "forbidden", str(error)
        except Hang as error:
            kind, words = "hang", str(error)
        except MemoryError as error:
            kind, words, where = "memory", str(error) or "MemoryError", _where(error)
        except BaseException as error:  # a panic of a Rust library is no Exception
            kind, words, where = type(error).__name__, str(error)[:300], _where(error)
        if seen and not kind:
            kind, words = "forbidden", seen[0]
    tally.inputs += 1
    tally.slowest = max(tally.slowest, time.process_time() - began)
    if message is not None and not kind:
        tally.messages.setdefault(shape(message), message[:300])
        bad = improper(message)
        if bad:
            kind, words = "message", f"{bad}: {message!r}"[:300]
    if not kind:
        return None
    found = Finding(target.name, index, kind, words, where, value)
    tally.findings.append(found)
    return found


def improper(message: str) -> str:
    """Why a message is not one plain line; nothing if it is."""
    if not message.strip():
        return "an empty message"
    if message.isascii() and message.isprintable() and len(message) <= 2000:
        return ""
    for character in message:
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
            return f"U+{ord(character):04X} in a message"
    return "a long message" if len(message) > 2000 else ""


def shape(message: str) -> str:
    """A message without what is the input's, so that equal ones are counted once."""
    text = re.sub(r"'[^']*'|\"[^\"]*\"|/\S+", "_", message)
    text = re.sub(r"^([\w .-]*?): .*; ", r"\1: _; ", text)
    return re.sub(r"[-+]?\d[\d.,e+-]*", "#", text)[:200]


def _where(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "fuzz_" not in f.filename]
    ours = [f for f in frames if "theory_lab" in f.filename]
    picked = [*ours[-1:], *frames[-1:]]
    return " < ".join(dict.fromkeys(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in picked))


def seeded(target: str, seed: int, index: int) -> random.Random:
    """The generator of one input: it does not depend on those before it."""
    digest = hashlib.blake2b(f"{seed}/{target}/{index}".encode(), digest_size=8).digest()
    return random.Random(int.from_bytes(digest, "little"))


def warm(heavy: bool = True) -> None:
    """Import what takes its time, and starts processes and threads of its own while it is imported."""
    import importlib

    light = ("numpy", "pandas", "pyarrow.parquet", "scipy.stats", "theory_lab.cli", "jinja2", "lxml.html")
    models = ("torch", "transformers", "theory_lab.models.lab", "theory_lab.probes.plan", "matplotlib.figure")
    for name in (*light, *(models if heavy else ())):
        importlib.import_module(name)
    if heavy:
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer  # noqa: F401  # lazy names


@contextlib.contextmanager
def workshop() -> Iterator[Place]:
    """A place in a temporary folder (in memory if there is such a disk), with caches of its own."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="theory-lab-fuzz-", dir=memory) as name:
        root = Path(name)
        kept = {key: os.environ.get(key) for key in ("TMPDIR", "THEORY_LAB_CACHE", "MPLCONFIGDIR", "HF_HUB_OFFLINE")}
        for key, folder in (("TMPDIR", "tmp"), ("THEORY_LAB_CACHE", "cache"), ("MPLCONFIGDIR", "mpl")):
            (root / folder).mkdir()
            os.environ[key] = str(root / folder)
        os.environ["HF_HUB_OFFLINE"] = "1"
        tempfile.tempdir = None
        here, place = os.getcwd(), Place(root / "work")
        place.clear()
        try:
            yield place
        finally:
            os.chdir(here)
            for key, value in kept.items():
                os.environ.pop(key, None) if value is None else os.environ.update({key: value})
            tempfile.tempdir = None


def encoded(value: Any) -> Any:
    """An input as JSON: bytes as Latin-1 under a name of their own."""
    if isinstance(value, bytes):
        return {"bytes": value.decode("latin-1")}
    if isinstance(value, dict):
        return {"files": {name: encoded(inner) for name, inner in value.items()}}
    if isinstance(value, (list, tuple)):
        return [encoded(inner) for inner in value]
    return value


def decoded(value: Any) -> Any:
    """What :func:`encoded` made, as it was."""
    if isinstance(value, dict) and set(value) == {"bytes"}:
        return value["bytes"].encode("latin-1")
    if isinstance(value, dict) and set(value) == {"files"}:
        return {name: decoded(inner) for name, inner in value["files"].items()}
    return [decoded(inner) for inner in value] if isinstance(value, list) else value


def corpus(folder: Path) -> list[tuple[str, str, Any]]:
    """The inputs that once did harm: (name, target, input)."""
    found = []
    for path in sorted(folder.glob("*.json")):
        about = json.loads(path.read_text(encoding="utf-8"))
        found.append((path.stem, about["target"], decoded(about["input"])))
    return found


def put(files: dict[str, Any], folder: Path) -> None:
    """Lay an input's files out in a folder; a name decides where, and never leads outside."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.write_bytes(content.encode("utf-8", "surrogatepass"))
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:  # a link: ["->", where it leads]
            path.symlink_to(content[1])
