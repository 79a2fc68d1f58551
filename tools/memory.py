"""Measure the peak memory of every command, and hold docs/memory.md against it.

    python tools/memory.py                    # measure all, write the table of docs/memory.md
    python tools/memory.py --only check-one   # some, and print them
    python tools/memory.py --check --only help,check-one,selftest    # fail if off by more than 20%

Peak resident memory of the largest process, as the kernel counts it (wait4's ru_maxrss, which includes children that
were waited for); commands with worker processes have several, and the table says how many. Commands run one after
another in a temporary folder, with one thread each; those that need results of others find them there.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "memory.md"
WITHIN = 0.20


@dataclass(frozen=True)
class Command:
    """A command to measure: a short name, what is typed, names of commands that must have run before, its processes."""

    name: str
    words: str
    after: tuple[str, ...] = ()
    processes: str = "1"
    codes: tuple[int, ...] = (0,)


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
    Command("report", "report results --html report.html --quiet", after=("check-sweep",)),
    Command("reproduce", "reproduce tda.figure-survivors --quick --out figures --workers 2 --quiet",
            processes="1 + workers"),
    Command("models", "models list"),
    Command("campaign", "campaign list"),
    Command("probe", "probe tda-pico --length 1024 --windows 1 --quiet"),
    Command("calibrate", "calibrate softmax-pico --length 512 --quiet"),
    Command("evaluate", "evaluate tda-pico --task recall:queries=4 --length 128 --samples 20 --quiet"),
    Command("train", "train --attention tda --size recall --task recall:queries=4 --length 64 --steps 20 --out model "
            "--quiet"),
    Command("corpus", "corpus build texts --out corpus --quiet"),
)  # fmt: skip


def peak(words: Sequence[str], folder: Path) -> tuple[float, int]:
    """Peak memory of the largest process in MB (10^6 bytes), and the exit code."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", "HF_HUB_OFFLINE": "1"}
    env["PYTHONPATH"] = str(ROOT)
    call = [sys.executable, "-m", "theory_lab.main", *words]
    with (folder / "output.txt").open("wb") as out:
        process = subprocess.Popen(call, cwd=folder, env=env, stdout=out, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_maxrss * 1024 / 1e6, process.returncode


def measure(chosen: Sequence[Command], folder: Path) -> dict[str, float]:
    """MB by name; what a command needs is run first, and not counted."""
    by_name = {command.name: command for command in COMMANDS}
    found: dict[str, float] = {}
    ran: dict[str, float] = {}

    def run(command: Command) -> float:
        for name in command.after:
            if name not in ran:
                run(by_name[name])
        megabytes, code = peak(shlex.split(command.words), folder)
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
