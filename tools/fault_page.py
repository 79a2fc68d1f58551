"""docs/reliability.md from the files of a run of ``tools/faults.py``."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_BEGIN, _END = "<!-- measured -->\n", "<!-- end -->"
_COUNTS = ("tried", "lost", "changed", "tracebacks", "untidy")
#: Failed faults that the page names.
_NAMED = 20


def write_page(run: Path, root: Path = ROOT) -> int:
    """Take the files of a run into figures/reliability, and write what they say into the page.

    Parameters
    ----------
    run : Path
        A folder with faults.csv and summary.json.
    root : Path
        The checkout.

    Returns
    -------
    int
        0.
    """
    kept, page = root / "figures" / "reliability", root / "docs" / "reliability.md"
    kept.mkdir(parents=True, exist_ok=True)
    for name in ("faults.csv", "summary.json"):
        if (run / name).resolve() != (kept / name).resolve():
            shutil.copyfile(run / name, kept / name)
    summary = json.loads((kept / "summary.json").read_text(encoding="utf-8"))
    with open(kept / "faults.csv", newline="", encoding="utf-8") as file:
        failed = [row for row in csv.DictReader(file) if any(row[name] != "0" for name in _COUNTS[1:])]
    text = page.read_text(encoding="utf-8")
    head, _, rest = text.partition(_BEGIN)
    _, found, tail = rest.partition(_END)
    if not found:
        raise SystemExit(f"{page}: {_BEGIN.strip()} and {_END} have to be there")
    page.write_text(head + _BEGIN + measured(summary, failed) + _END + tail, encoding="utf-8")
    print(f"{page}: {summary['faults']} faults, {len(failed)} of them failed")
    return 0


def measured(summary: dict[str, Any], failed: list[dict[str, str]]) -> str:
    """What a run measured, in Markdown."""
    kinds = summary["kinds"]
    total = {name: sum(kind[name] for kind in kinds) for name in (*_COUNTS, "sigkills")}
    lines = [
        f"{total['tried']} faults of {len(kinds)} kinds, with {total['sigkills']} SIGKILLs at random moments: "
        f"{total['lost']} results lost, {total['changed']} changed, {total['tracebacks']} tracebacks.",
        "",
        f"| fault | {' | '.join(_COUNTS)} |",
        "|---|---|---|---|---|---|",
    ]
    for kind in kinds:
        lines.append(f"| {kind['what']} (`{kind['kind']}`) | " + " | ".join(str(kind[name]) for name in _COUNTS) + " |")
    lines.append(f"| **{len(kinds)} kinds** | " + " | ".join(f"**{total[name]}**" for name in _COUNTS) + " |")
    lines += ["", _about(summary)]
    for name, why in summary.get("not_tried", {}).items():
        lines.append(f"Not tried: `{name}`, because {why}.")
    if failed:
        lines += ["", "What went wrong:", ""]
        lines += [f"- `{row['kind']}`, number {row['trial']}: {_said(row)}" for row in failed[:_NAMED]]
        if len(failed) > _NAMED:
            lines.append(f"- and {len(failed) - _NAMED} more, which are in the file.")
    return "\n".join(lines) + "\n"


def _about(summary: dict[str, Any]) -> str:
    """Of which run, and of which code."""
    file = "Every fault is a line of `figures/reliability/faults.csv`; versions are in `summary.json` beside it."
    if "commit" not in summary:
        return f"These are the records of more than one run, or of code without a commit. {file}"
    words = [f"That was one run of `tools/faults.py` of commit {summary['commit'][:7]}", f"seed {summary['seed']}"]
    if "date" in summary:
        words.append(f"on {summary['date']}")
    if "processes" in summary:
        words.append(f"{summary['processes']} faults at a time" if summary["processes"] > 1 else "one fault at a time")
        seconds = summary["wall_seconds"]
        words.append(f"{seconds:.0f} seconds" if seconds < 120 else f"{seconds / 60:.0f} minutes")
    if "cores" in summary:
        words.append(f"on a machine with {summary['cores']} cores")
    cut = summary.get("not_begun", 0)
    cut_short = f" Its time was limited: {cut} more faults were not begun." if cut else ""
    return f"{', '.join(words)}.{cut_short} {file}"


def _said(row: dict[str, str]) -> str:
    counts = ", ".join(f"{row[name]} {name}" for name in _COUNTS[1:] if row[name] != "0")
    notes = " ".join(row["notes"].replace("|", "/").replace("`", "'").split())
    return counts + (f" ({notes[:200]})" if notes else "")
