"""``theory-lab reproduce``: figures and tables from experiments as data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from theory_lab.commands.parsing import EXIT_INTERRUPTED, EXIT_USAGE, fail, one_whole
from theory_lab.errors import InputError
from theory_lab.outside import visible

if TYPE_CHECKING:
    from theory_lab.reproduce.run import Outcome


def _complete(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    from theory_lab.reproduce import experiments

    known = experiments()
    names = ["all", *dict.fromkeys(e.folder for e in known.values()), *known]
    return [CompletionItem(name) for name in names if name.startswith(typed)]


@click.command("reproduce")
@click.argument("names", nargs=-1, metavar="[EXPERIMENT|PAPER|all|FILE.toml]...", shell_complete=_complete)
@click.option("--quick", is_flag=True, help="A size for two CPU cores. Default: the full size.")
@click.option("--out", default="figures", show_default=True, metavar="DIR", help="Where pictures and tables go.")
@click.option("--force", is_flag=True, help="Compute and draw again what is known already.")
@click.option("--format", "forms", default="png,pdf,md,csv,tex", show_default=True, metavar="LIST",
              help="Of png, pdf, svg (pictures) and md, csv, tex (tables); numbers (csv) are always kept.")  # fmt: skip
@click.option("--data", default="results", show_default=True, metavar="DIR",
              help="Results of trained models, for experiments that need them.")  # fmt: skip
@click.option("--workers", metavar="NUMBER", help="Worker processes. Default: one a core.")
@click.option("--gallery", is_flag=True, help="Write only the gallery, DIR/README.md, of what is there.")
@click.option("--quiet", is_flag=True, help="No progress.")
def command(
    names: tuple[str, ...], quick: bool, out: str, force: bool, forms: str, data: str, workers: str | None,
    gallery: bool, quiet: bool,
) -> int:  # fmt: skip
    """Draw the papers' figures and tables, and our own.

    With no EXPERIMENT, list them with their state. A path to a TOML file draws your own.

    Exit code: 0 all is drawn that can be drawn here, 1 something failed, 2 bad usage.

    \b
    theory-lab reproduce
    theory-lab reproduce tda.figure-survivors
    theory-lab reproduce all --quick
    theory-lab reproduce mine.toml --out pictures
    """
    if not out:
        raise InputError("out", "an empty name", "the path of a folder is allowed")
    if gallery:
        if names:
            raise InputError("gallery", " ".join(names), "it takes no experiments: it shows what is drawn")
        from theory_lab.reproduce.gallery import write_gallery

        click.echo(visible(f"theory-lab: {write_gallery(Path(out), data)}"), err=True)
        return 0
    if not names:
        _list(Path(out), data)
        return 0
    count = None if workers is None else one_whole(workers, "workers")
    if count is not None:
        from theory_lab.engine import validate_workers

        validate_workers(count)
    formats = [form.strip() for form in forms.split(",") if form.strip()]
    if not formats:
        raise InputError("format", forms, "at least one of png, pdf, svg, md, csv, tex is needed")
    return _draw(names, quick, Path(out), force, formats, data, count, quiet)


def _draw(
    names: tuple[str, ...], quick: bool, out: Path, force: bool, formats: list[str], data: str, workers: int | None,
    quiet: bool,
) -> int:  # fmt: skip
    from theory_lab.progress import make_progress
    from theory_lab.reproduce import select
    from theory_lab.reproduce.gallery import write_gallery
    from theory_lab.reproduce.run import reproduce
    from theory_lab.store import require_pyarrow

    chosen = select(names)
    require_pyarrow()

    def say(line: str) -> None:
        if not quiet:
            click.echo(visible(f"theory-lab: {line}"), err=True)

    try:
        outcomes = reproduce(
            chosen, out, quick=quick, force=force, formats=formats, data=data, workers=workers, say=say,
            progress=lambda: make_progress(quiet),
        )  # fmt: skip
    except KeyboardInterrupt:
        fail("interrupted")
        click.echo("what is computed is kept: the same command goes on from there", err=True)
        raise click.exceptions.Exit(EXIT_INTERRUPTED) from None
    for outcome in outcomes:
        for path in outcome.files:
            click.echo(visible(path))
    say(write_gallery(out, data))
    return _code(outcomes, set(names))


def _code(outcomes: list[Outcome], names: set[str]) -> int:
    """1 if something failed; 2 for bad input, or if something that was named itself cannot be done here."""
    code = 0
    for outcome in outcomes:
        if outcome.failure:
            fail(f"{outcome.experiment.id}: {outcome.failure}")
            code = EXIT_USAGE if outcome.bad_input else code or 1
        elif outcome.lacking is not None and outcome.experiment.id in names:
            fail(f"{outcome.experiment.id}: {outcome.lacking.state}; {outcome.lacking.why}")
            code = EXIT_USAGE
    return code


def _list(out: Path, data: str) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from theory_lab.reproduce import experiments
    from theory_lab.reproduce.state import FRESH, states

    known = experiments()
    found = states(list(known.values()), out, data)
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("experiment", "state", "what it shows"):
        table.add_column(name, no_wrap=name != "what it shows", overflow="fold")
    folder = ""
    for experiment in known.values():
        if folder and experiment.folder != folder:
            table.add_row("")
        folder = experiment.folder
        state = found[experiment.id]
        note = f" ({state.detail})" if state.word == FRESH and state.detail else ""
        table.add_row(escape(experiment.id), state.word, escape(experiment.title + note))
    console.print(table)
    counts: dict[str, int] = {}
    for state in found.values():
        counts[state.word] = counts.get(state.word, 0) + 1
    lines = [
        f"\n{len(known)} experiments: " + ", ".join(f"{n} {word}" for word, n in counts.items()),
        "Draw with: theory-lab reproduce EXPERIMENT|PAPER|all [--quick]",
    ]
    if any(word.startswith("needs") for word in counts):
        lines.append("What one needs is said when it is named: theory-lab reproduce EXPERIMENT")
    for line in lines:
        console.print(line, soft_wrap=True)
