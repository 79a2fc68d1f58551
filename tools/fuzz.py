"""Fuzzing of everything that reads what strangers wrote, by one command: ``make fuzz``, or ``python tools/fuzz.py``.

Inputs of a target are a function of its name, the seed and their number, so that every finding can be run again alone:
``python tools/fuzz.py --target scores-npy --first 1234 --inputs 1``. Each target runs in processes of its own, under
the guard of tests/fuzz/fuzz_harness.py; an input that ends its process is a finding too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from multiprocessing import connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(HERE / "tests" / "fuzz"), str(HERE), str(HERE / "kernels")]
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
sys.dont_write_bytecode = True

#: Inputs of one process: memory that libraries never give back is given back with it.
_PART = 30_000
#: Seconds of wall-clock time without an answer after which a process is ended from outside.
_SILENT = 180.0
#: Findings after which a target is left.
_MOST_FOUND = 2000


def main() -> int:
    """Run what the command line asks for; 1 if there are findings."""
    parser = argparse.ArgumentParser(description="Fuzz the readers, the command line and the explorer.")
    parser.add_argument("--inputs", type=float, default=20_000, help="inputs in all, over all targets (default 20000)")
    parser.add_argument("--minutes", type=float, help="end after so long, however many inputs that were")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--processes", type=int, default=1, help="inputs of so many parts side by side (default 1)")
    parser.add_argument("--commit", help="of the code, where it is no checkout")
    parser.add_argument("--target", action="append", help="only this one; repeatable")
    parser.add_argument("--out", help="write what was counted and found here, as JSON")
    parser.add_argument("--list", action="store_true", help="list the targets, and leave")
    parser.add_argument(
        "--coverage", action="store_true",
        help="let atheris choose the inputs by the code that they reach, for targets that read one file",
    )  # fmt: skip
    parser.add_argument(
        "--figures", nargs="+", metavar="FILE", help="write the figures of such JSON files into SECURITY.md"
    )
    parser.add_argument("--show", action="store_true", help="print each distinct message")
    chosen = parser.parse_args()
    if chosen.figures:
        return figures(chosen.figures)
    from fuzz_targets import TARGETS

    from theory_lab.selftest.certificate import code_hash
    from theory_lab.store import write_whole
    from theory_lab.store.versions import provenance

    if chosen.processes < 1:
        parser.error(f"processes: {chosen.processes}; 1 or more is allowed")
    targets = {target.name: target for target in TARGETS}
    if chosen.list:
        print("\n".join(targets))
        return 0
    for name in chosen.target or ():
        if name not in targets:
            parser.error(f"target: {name}; known are {', '.join(targets)}")
    names = chosen.target or list(targets)
    if chosen.coverage:
        from fuzz_coverage import BYTES

        names = [name for name in names if name in BYTES]
        if not names:
            parser.error(f"coverage: it is for {', '.join(BYTES)}")
    whole = sum(targets[name].share for name in names)
    if not chosen.coverage:
        import fuzz_harness

        fuzz_harness.warm(any(targets[name].heavy for name in names))
    end = None if chosen.minutes is None else time.monotonic() + 60 * chosen.minutes
    report: dict[str, Any] = {
        "seed": chosen.seed, "first": chosen.first, "processes": chosen.processes, "code": code_hash(),
        "commit": chosen.commit or provenance()["commit"], "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "python": platform.python_version(), "targets": {},
    }  # fmt: skip
    began = time.monotonic()
    counts = {name: max(round(chosen.inputs * targets[name].share / whole), 1) for name in names}

    def keep() -> None:
        report["seconds"] = round(time.monotonic() - began, 1)
        if chosen.out:
            write_whole(chosen.out, json.dumps(report, indent=1).encode())

    def show(name: str) -> None:
        tally = report["targets"][name]
        print(line(name, tally), flush=True)
        for finding in tally["findings"]:
            print(
                f"    #{finding['index']} {finding['kind']}: {finding['words'][:160]}  [{finding['where']}]", flush=True
            )
        if chosen.show:
            for message in sorted(tally["messages"].values()):
                print(f"    {message}")

    if chosen.coverage:
        for place, name in enumerate(names):
            report["targets"][name] = _covered(name, chosen.seed, counts[name], _until(end, targets, names[place:]))
            show(name)
            keep()
    else:
        parts = {name: parts_of(targets[name], chosen.seed, chosen.first, counts[name]) for name in names}
        # With a time to end at, the targets get their shares of it in turn. Without, all go together, and those come
        # first that take long to warm up, or long for an input: there are few of these.
        order = sorted(names, key=lambda name: (-targets[name].settled, counts[name]))
        rounds = [order] if end is None else [[name] for name in names]
        for place, some in enumerate(rounds):
            until = _until(end, targets, names[place:])
            done: dict[str, list[Part]] = {name: [] for name in some}
            for part in together([part for name in some for part in parts[name]], chosen.processes, until):
                done[part.name] = sorted([*done[part.name], part], key=lambda one: one.first)
                report["targets"][part.name] = merged(one.tally for one in done[part.name])
                if len(done[part.name]) == len(parts[part.name]):
                    show(part.name)
                keep()
            for name in some:
                if len(done[name]) < len(parts[name]):  # cut short
                    report["targets"].setdefault(name, _nothing())
                    show(name)
        report["targets"] = {name: report["targets"][name] for name in names}
    keep()
    counted = list(report["targets"].values())
    inputs, bad = sum(t["inputs"] for t in counted), sum(t["found"] for t in counted)
    messages = sum(len(t["messages"]) for t in counted)
    print(
        f"{inputs:,} inputs, {bad:,} findings, {messages:,} distinct messages, "
        f"{report['seconds']:,.0f} s, seed {chosen.seed}"
    )
    return 1 if bad else 0


def _until(end: float | None, targets: dict[str, Any], left: list[str]) -> float | None:
    """When the first of the targets that are left has had its share of the time that is left."""
    if end is None:
        return None
    now = time.monotonic()
    return now + max(end - now, 0) * targets[left[0]].share / sum(targets[name].share for name in left)


def figures(files: list[str]) -> int:
    """Put the table of some runs between the marks in SECURITY.md."""
    runs = [json.loads(Path(file).read_text(encoding="utf-8")) for file in files]
    names = sorted({name for run in runs for name in run["targets"]})
    rows = {name: merged(run["targets"][name] for run in runs if name in run["targets"]) for name in names}
    total = {key: sum(row[key] for row in rows.values()) for key in ("inputs", "found", "seconds")}
    said = [_about(run) for run in runs]
    lines = [
        f"{total['inputs']:,} inputs, {total['found']:,} findings: {'; '.join(dict.fromkeys(said))}.",
        "",
        "| target | inputs | taken | refused | distinct messages | slowest, s | memory, MB | findings |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    whole = {key: sum(row[key] for row in rows.values()) for key in ("inputs", "taken", "refused", "found")}
    whole["messages"] = {f"{name} {key}" for name, row in rows.items() for key in row["messages"]}
    whole["slowest"] = max(row["slowest"] for row in rows.values())
    whole["memory"] = max(row["memory"] for row in rows.values())
    for name, row in (*sorted(rows.items()), ("all", whole)):
        lines.append(
            f"| {name} | {row['inputs']:,} | {row['taken']:,} | {row['refused']:,} | {len(row['messages']):,} "
            f"| {row['slowest']:.2f} | {row['memory'] / 1e6:,.0f} | {row['found']:,} |"
        )
    page = HERE / "SECURITY.md"
    text = page.read_text(encoding="utf-8")
    begin, end = "<!-- figures begin -->\n", "<!-- figures end -->"
    head, _, rest = text.partition(begin)
    page.write_text(head + begin + "\n".join(lines) + "\n" + end + rest.partition(end)[2], encoding="utf-8")
    print(lines[-1])
    return 0


def _about(run: dict[str, Any]) -> str:
    """Which inputs a run had, when, of which code, and how long it took."""
    commit = f"commit {run['commit'][:7]}" if run["commit"] else f"code {run['code'][:12]}"
    many = "1 process" if run["processes"] == 1 else f"{run['processes']} processes"
    return (
        f"seed {run['seed']}, from input {run['first']} of each target on, {run['date']}, {commit}, "
        f"Python {run['python']}, {many}, {run['seconds']:,.0f} s"
    )


def _nothing() -> dict[str, Any]:
    """What was counted before anything was."""
    numbers: dict[str, Any] = dict.fromkeys(("inputs", "taken", "refused", "found", "memory"), 0)
    return {**numbers, "slowest": 0.0, "seconds": 0.0, "messages": {}, "findings": []}


def line(name: str, tally: dict[str, Any]) -> str:
    """One target, for people."""
    rate = tally["inputs"] / max(tally["seconds"], 1e-9)
    return (
        f"{name:22} {tally['inputs']:9,} inputs {tally['taken']:8,} taken {tally['refused']:9,} refused "
        f"{len(tally['messages']):4} messages  slowest {tally['slowest']:5.2f} s  "
        f"memory +{tally['memory'] / 1e6:4.0f} MB "
        f"{rate:6,.0f}/s {tally['found']:4} findings"
    )


def _covered(name: str, seed: int, inputs: int, until: float | None) -> dict[str, Any]:
    """Inputs of one target that atheris chooses, in a process of its own."""
    began = time.monotonic()
    whole: dict[str, Any] = {
        "inputs": 0,
        "taken": 0,
        "refused": 0,
        "slowest": 0.0,
        "memory": 0,
        "messages": {},
        "findings": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        script = HERE / "tests" / "fuzz" / "fuzz_coverage.py"
        left = None if until is None else max(until - began, 1.0)
        words = [sys.executable, str(script), name, str(inputs), str(seed), str(report)]
        try:
            done = subprocess.run(words, timeout=left, capture_output=True, text=True, check=False)
            ended = f"the process ended with code {done.returncode}: {done.stderr[-300:]}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            ended = ""
        if report.exists():
            whole |= json.loads(report.read_text(encoding="utf-8"))
        whole["found"] = len(whole["findings"])
        if ended:
            whole["found"] += 1
            whole["findings"].append(
                {"index": whole["inputs"], "kind": "crash", "words": ended, "where": "", "input": None}
            )
    for number, finding in enumerate(whole["findings"]):
        finding.setdefault("index", number)
    return {**whole, "seconds": time.monotonic() - began}


class Part:
    """Some inputs of one target, in a process of its own, and in another one after each that is lost.

    Parameters
    ----------
    name : str
        The target.
    seed, first, last : int
        Its inputs.
    """

    def __init__(self, name: str, seed: int, first: int, last: int) -> None:
        self.name, self.seed, self.first, self.last = name, seed, first, last
        self.tally = _nothing()
        self._until: float | None = None
        self._fatal: list[int] = []

    def start(self, until: float | None) -> None:
        """Begin; after ``until`` (of time.monotonic) it ends by itself."""
        self._until, self._began = until, time.monotonic()
        self._start(self.first)

    def _start(self, at: int) -> None:
        self._from = at
        # A fork has everything imported already; what is imported starts no threads.
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe(duplex=False)
        # In shared memory: a word about every input through a pipe would cost as much as it.
        self._at = context.RawValue("q", at)
        self._process = context.Process(
            target=_work, args=(self.name, self.seed, at, self.last, self._fatal, self._until, self._at, theirs)
        )
        self._process.start()
        theirs.close()
        self._said: dict[str, Any] | None = None
        self._seen, self._since = at, time.monotonic()

    def ended(self) -> bool:
        """Hear what it says; whether it is done."""
        try:
            while self.pipe.poll():
                said = self.pipe.recv()
                if "broken" in said:
                    sys.exit(said["broken"])
                self._said, self._from = said["tally"], said["at"]
                if said["finished"]:
                    self._process.join()
                    return self._take(said["tally"])
        except EOFError:
            self._process.join()
            return self._lost("crash", f"the process ended with code {self._process.exitcode}")
        if self._at.value != self._seen:
            self._seen, self._since = self._at.value, time.monotonic()
        elif time.monotonic() - self._since > _SILENT:
            self.kill()
            return self._lost("hang", f"no answer within {_SILENT:g} s")
        return False

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.join()

    def _lost(self, kind: str, words: str) -> bool:
        """Count the input that ended the process, and go on without it from what was said last; whether that is all."""
        kept = self._said or _nothing()
        kept["inputs"] += 1
        kept["found"] += 1
        at = self._at.value
        kept["findings"].append(
            {"target": self.name, "index": at, "kind": kind, "words": words, "where": "", "input": None}
        )
        self._take(kept)
        self._fatal.append(at)
        if self.tally["found"] > _MOST_FOUND or _over(self._until):
            return True
        self._start(self._from)
        return False

    def _take(self, tally: dict[str, Any]) -> bool:
        self.pipe.close()
        self.tally = merged([self.tally, tally])
        self.tally["seconds"] = time.monotonic() - self._began
        return True


def merged(tallies: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What was counted in several parts of a target, given in their order."""
    whole = _nothing()
    for tally in tallies:
        for key in ("inputs", "taken", "refused", "found", "seconds"):
            whole[key] += tally.get(key, 0)
        for key in ("slowest", "memory"):
            whole[key] = max(whole[key], tally[key])
        for shape, message in tally["messages"].items():
            whole["messages"].setdefault(shape, message)
        known = {(f["kind"], f["where"], f["words"][:40]) for f in whole["findings"]}
        for finding in tally["findings"]:  # each kind of fault once
            key = (finding["kind"], finding["where"], finding["words"][:40])
            if key not in known and len(whole["findings"]) < 60:
                known.add(key)
                whole["findings"].append(finding)
    return whole


def parts_of(target: Any, seed: int, first: int, inputs: int) -> list[Part]:
    """A target's inputs as parts that may run side by side: the same ones in however many processes."""
    # Memory is limited once everything is imported: that first stretch of a part stays a small one.
    size = min(max(-(-inputs // 8), 20 * target.settled), _PART)
    last = first + inputs
    return [Part(target.name, seed, at, min(at + size, last)) for at in range(first, last, size)]


def together(parts: list[Part], processes: int, until: float | None) -> Iterator[Part]:
    """Parts as they end, so many at a time; after ``until`` none begins."""
    waiting, running = list(parts), []
    found: dict[str, int] = {}
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                part = waiting.pop(0)
                if not _over(until) and found.get(part.name, 0) <= _MOST_FOUND:
                    part.start(until)
                    running.append(part)
            connection.wait([part.pipe for part in running], 1.0)
            for part in [part for part in running if part.ended()]:
                running.remove(part)
                found[part.name] = found.get(part.name, 0) + part.tally["found"]
                yield part
    finally:
        for part in running:
            part.kill()


def _over(until: float | None) -> bool:
    return until is not None and time.monotonic() >= until


def _work(
    name: str, seed: int, first: int, last: int, fatal: list[int], until: float | None, at: Any, pipe: Any
) -> None:
    """One process: its inputs but those that ended another; ``at`` says which one runs, since it may end this one."""
    import warnings

    import fuzz_harness as harness
    from fuzz_targets import TARGETS

    warnings.simplefilter("ignore")
    target = next(one for one in TARGETS if one.name == name)
    parent = os.getppid()
    tally = harness.Tally(name)
    with harness.workshop() as place:
        index, began = first, time.monotonic()
        warm, memory, told = False, 0, 0.0
        while index < last and (until is None or time.monotonic() < until):
            if index in fatal:
                index += 1
                continue
            try:
                value = target.make(harness.seeded(name, seed, index))
            except Exception as error:  # a fault of the fuzzer
                pipe.send({"broken": f"input {index} of {name} cannot be made: {error!r}"})
                raise
            at.value = index
            if os.getppid() != parent:  # killed, and this process with it
                os._exit(1)
            if time.monotonic() - told > 5.0:
                pipe.send({"finished": False, "at": index, "tally": _plain(tally)})
                told = time.monotonic()
            found = harness.run_one(target, value, place, tally, index)
            if found is not None and found.kind == "hang":
                # Once may be the machine's doing: it counts if it takes as long again.
                again = harness.Tally(name)
                if harness.run_one(target, target.make(harness.seeded(name, seed, index)), place, again, index) is None:
                    tally.findings.remove(found)
                    tally.taken, tally.refused = tally.taken + again.taken, tally.refused + again.refused
            if not warm and (index - first >= target.settled or time.monotonic() - began > 60):
                warm, memory = True, harness.status("VmRSS")  # whatever is imported is imported by now
                if target.limited:
                    harness.limit_memory()
            index += 1
        tally.memory = max(harness.status("VmHWM") - memory, 0) if warm else 0
        harness.free_memory()
    pipe.send({"finished": True, "at": index, "tally": _plain(tally)})


def _plain(tally: Any) -> dict[str, Any]:
    import fuzz_harness as harness

    about = asdict(tally)
    about["found"] = len(tally.findings)
    kept, seen = [], set()
    for finding in tally.findings:
        key = (finding.kind, finding.where, finding.words[:40])
        if key not in seen:
            seen.add(key)
            kept.append({**asdict(finding), "input": harness.encoded(finding.input)})
    about["findings"] = kept
    return about


if __name__ == "__main__":
    sys.exit(main())
