"""The gallery: a generated page of every picture and table, with captions in plain words."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

from theory_lab.outside import read_json
from theory_lab.reproduce.spec import OWN, SIZES, Experiment, experiments
from theory_lab.reproduce.state import State, drawn, states

_MARK = "<!-- Written by `theory-lab reproduce`; edit the captions in experiments/, not here. -->"
_HEADS = {
    "tda": "Threshold differential attention (TDA)",
    "asentmax": "Adaptive-scalable entmax (ASEntmax)",
    "eta": "Elastic threshold attention (ETA)",
    "ours": "Results of this toolkit",
}


def write_gallery(out: Path, data: str) -> str:
    """Write ``out/README.md``; one line about what was done.

    A file of that name that is no gallery is left alone.
    """
    from theory_lab.store import write_whole

    target = out / "README.md"
    if target.exists() and _MARK not in target.read_text(encoding="utf-8", errors="replace")[:400]:
        return f"{target} is no gallery and is left as it is"
    known = experiments()
    text = gallery(known, states(list(known.values()), out, data), out)
    write_whole(str(target), text.encode("utf-8", "backslashreplace"))  # names of files can be no text
    return f"gallery: {target}"


def gallery(known: dict[str, Experiment], found: dict[str, State], out: Path) -> str:
    """The page's text."""
    lines = ["# Figures and tables", "", _MARK, ""]
    how = " [how it works](../docs/reproduce.md)." if (out / "../docs/reproduce.md").is_file() else ""
    lines += [
        "Every picture comes from one file of `experiments/` by one command, `theory-lab reproduce NAME`, and has its "
        f"numbers beside it. `theory-lab reproduce` lists them all with their state{';' if how else '.'}{how}",
        "",
        *_own(out),
    ]
    for folder in dict.fromkeys(e.folder for e in known.values()):
        mine = [e for e in known.values() if e.folder == folder]
        lines += [f"## {_HEADS.get(folder, folder)}", ""]
        waiting = []
        for experiment in mine:
            about = drawn(out, experiment)
            if about is None:
                waiting.append(experiment)
            else:
                lines += _entry(experiment, about)
        if waiting:
            lines += ["Not drawn yet:", ""]
            for experiment in waiting:
                state = found[experiment.id]
                lines.append(
                    f"- `{experiment.id}`, {experiment.title}: {state.word}"
                    + (f": {state.detail}" if state.detail else "")
                )
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _own(out: Path) -> list[str]:
    """The section of pictures drawn from a user's own files, which say themselves what they show."""
    from theory_lab.report.markdown import escape

    lines = []
    for path in sorted((out / OWN).glob("*.json")):
        try:
            about = read_json(path)
            title, caption, source = (escape(str(about[name])) for name in ("title", "caption", "source"))
            names = [name for name in about["files"] if name == Path(name).name and (path.parent / name).is_file()]
            size = about["size"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        lines += _show(
            title, caption, source, size, {name: f"{OWN}/{quote(name)}" for name in names}, f"{path.stem}.toml"
        )
    return ["## Own experiments", "", *lines] if lines else []


def _entry(experiment: Experiment, about: dict[str, Any]) -> list[str]:
    files = {name: f"{experiment.folder}/{name}" for name in about["files"]}
    words = (experiment.title, experiment.caption, experiment.source)
    # Where nothing differs between the sizes there is nothing to say.
    return _show(*words, about["size"] if experiment.quick else "", files, experiment.id)


def _show(title: str, caption: str, source: str, size: str, paths: dict[str, str], name: str) -> list[str]:
    files = {Path(file).suffix[1:]: path for file, path in paths.items()}
    words = {"pdf": "PDF", "svg": "SVG", "csv": "numbers", "tex": "LaTeX", "md": "table"}
    links = ", ".join(f"[{words[s]}]({files[s]})" for s in ("md", "pdf", "svg", "tex", "csv") if s in files)
    picture = next((files[s] for s in ("png", "svg") if s in files), None)
    lines = [f"### {title}", ""]
    if picture:
        lines += [f"![{title}]({picture})", ""]
    lines += [
        f"{caption}{f' {size.capitalize()} size.' if size in SIZES else ''}",
        "",
        f"{source.rstrip('.')}. {links}. `theory-lab reproduce {name}`",
        "",
    ]
    return lines
