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
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
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


def main() -> int:
    """Run what the command line asks for; 1 if there are findings."""
    parser = argparse.ArgumentParser(description="Fuzz the readers, the command line and the explorer.")
    parser.add_argument("--inputs", type=float, default=20_000, help="inputs in all, over all targets (default 20000)")
    parser.add_argument("--minutes", type=float, help="end after so long, however many inputs that were")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
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
    report: dict[str, Any] = {"seed": chosen.seed, "targets": {}}
    began = time.monotonic()
    for place, name in enumerate(names):
        part = targets[name].share / whole
        until = None
        if end is not None:  # what is left is dealt out by share
            left = sum(targets[n].share for n in names[place:])
            until = time.monotonic() + max(end - time.monotonic(), 0) * targets[name].share / left
        count = max(round(chosen.inputs * part), 1)
        if chosen.coverage:
            tally = _covered(name, chosen.seed, count, until)
        else:
            tally = _target(name, chosen.seed, chosen.first, count, until)
        print(line(name, tally), flush=True)
        for finding in tally["findings"]:
            print(
                f"    #{finding['index']} {finding['kind']}: {finding['words'][:160]}  [{finding['where']}]", flush=True
            )
        if chosen.show:
            for message in sorted(tally["messages"].values()):
                print(f"    {message}")
        report["targets"][name] = tally
        report["seconds"] = round(time.monotonic() - began, 1)
        if chosen.out:
            Path(chosen.out).write_text(json.dumps(report, indent=1), encoding="utf-8")
    counted = list(report["targets"].values())
    inputs, bad = sum(t["inputs"] for t in counted), sum(t["found"] for t in counted)
    messages = sum(len(t["messages"]) for t in counted)
    print(
        f"{inputs:,} inputs, {bad:,} findings, {messages:,} distinct messages, "
        f"{report['seconds']:,.0f} s, seed {chosen.seed}"
    )
    return 1 if bad else 0


def figures(files: list[str]) -> int:
    """Put the table of some runs between the marks in SECURITY.md."""
    rows: dict[str, dict[str, Any]] = {}
    for file in files:
        for name, tally in json.loads(Path(file).read_text(encoding="utf-8"))["targets"].items():
            row = rows.setdefault(name, _nothing())
            for key in ("inputs", "taken", "refused", "found"):
                row[key] += tally[key]
            for key in ("slowest", "memory"):
                row[key] = max(row[key], tally[key])
            row["messages"].update(tally["messages"])
    lines = [
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


def _target(name: str, seed: int, first: int, inputs: int, until: float | None) -> dict[str, Any]:
    """All inputs of one target, in processes of :data:`_PART` each."""
    whole = _nothing()
    began = time.monotonic()
    at, last = first, first + inputs
    while at < last and (until is None or time.monotonic() < until):
        done, at = _part(name, seed, at, min(at + _PART, last), until)
        for key in ("inputs", "taken", "refused", "found"):
            whole[key] += done[key]
        for key in ("slowest", "memory"):
            whole[key] = max(whole[key], done[key])
        whole["messages"].update(done["messages"])
        whole["seconds"] = time.monotonic() - began
        known = {(f["kind"], f["where"], f["words"][:40]) for f in whole["findings"]}
        for finding in done["findings"]:  # each kind of fault once
            key = (finding["kind"], finding["where"], finding["words"][:40])
            if key not in known and len(whole["findings"]) < 60:
                known.add(key)
                whole["findings"].append(finding)
        if whole["found"] > 2000:
            break
    return whole


def _part(name: str, seed: int, first: int, last: int, until: float | None) -> tuple[dict[str, Any], int]:
    """Inputs ``first`` to ``last`` in one process; what was found, and the first input that is not done."""
    # A fork has everything imported already; what is imported starts no threads.
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    at = context.RawValue(
        "q", first
    )  # in shared memory: a word about every input through a pipe would cost as much as it
    process = context.Process(target=_work, args=(name, seed, first, last, until, at, theirs))
    process.start()
    theirs.close()
    tally: dict[str, Any] | None = None
    seen, since = at.value, time.monotonic()
    try:
        while True:
            if ours.poll(2.0):
                said = ours.recv()
                if "broken" in said:
                    sys.exit(said["broken"])
                tally = said["tally"]
                if said["finished"]:
                    process.join()
                    return said["tally"], said["at"]
            if at.value != seen:
                seen, since = at.value, time.monotonic()
            elif time.monotonic() - since > _SILENT:
                process.kill()
                return _ended(name, tally, at.value, "hang", f"no answer within {_SILENT:g} s")
    except EOFError:
        process.join()
        return _ended(name, tally, at.value, "crash", f"the process ended with code {process.exitcode}")


def _ended(name: str, tally: dict[str, Any] | None, at: int, kind: str, words: str) -> tuple[dict[str, Any], int]:
    """The tally of a process that was lost, as it had said it last, and the input that it was at."""
    kept = tally or _nothing()
    kept["inputs"] += 1
    kept["found"] += 1
    kept["findings"].append({"target": name, "index": at, "kind": kind, "words": words, "where": "", "input": None})
    return kept, at + 1


def _work(name: str, seed: int, first: int, last: int, until: float | None, at: Any, pipe: Any) -> None:
    """One process: its inputs; ``at`` says which one runs, since it may end the process."""
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
            try:
                value = target.make(harness.seeded(name, seed, index))
            except Exception as error:  # a fault of the fuzzer
                pipe.send({"broken": f"input {index} of {name} cannot be made: {error!r}"})
                raise
            at.value = index
            if os.getppid() != parent:  # killed, and this process with it
                os._exit(1)
            if time.monotonic() - told > 5.0:
                pipe.send({"finished": False, "tally": _plain(tally)})
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
