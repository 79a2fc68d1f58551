"""``theory-lab results``: what lies in a results folder, whether it is sound, and how to take it elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from theory_lab.errors import InputError, StoreError

if TYPE_CHECKING:
    from theory_lab.store.archive import Archive, Place

#: Lines of cells that are printed unless all are asked for.
_MOST_LINES = 60
_DAMAGED = 1
_SHORTEST_PREFIX = 4


@click.group("results")
def command() -> None:
    """Look into a results folder, check it, pack it, export it.

    \b
    theory-lab check tda-4.3 --out results/first
    theory-lab results ls results/first
    theory-lab results verify results/first
    """


def _open(store: str) -> Archive:
    from theory_lab.store.versions import require_pyarrow

    require_pyarrow()
    from theory_lab.store.archive import Archive

    return Archive(store)


_FORMAT = click.option("--format", "form", default="table", show_default=True,
                       type=click.Choice(["table", "json", "csv"]), help="What goes to standard output.")  # fmt: skip


@command.command("ls")
@click.argument("store", metavar="DIR")
@click.option("--cells", is_flag=True, help="One line a cell, instead of one for each kind of cell.")
@click.option("--full", is_flag=True, help="Print every cell, however many.")
@_FORMAT
def ls_command(store: str, cells: bool, full: bool, form: str) -> None:
    """List what a results folder holds; json and csv give every cell.

    Peak memory: 130 MB, and 1.2 KB a cell; 1.8 KB for json and csv.
    """
    archive = _open(store)
    table, damaged = archive.table()
    for item in damaged:
        click.echo(f"theory-lab: {item.what}; theory-lab results verify {store}", err=True)
    if form != "table":
        from theory_lab.render import to_json
        from theory_lab.store.export import to_csv

        frame = table.drop_columns(["first_row", "about", "findings"]).to_pandas()
        click.echo(to_json(frame) if form == "json" else to_csv(frame).rstrip("\n"))
        return
    _print_head(archive, table)
    if cells or full:
        _print_cells(table, None if full else _MOST_LINES)
    else:
        _print_groups(table)


def _print_head(archive: Archive, table: Any) -> None:
    import pyarrow.compute as pc

    version = archive.version
    made = f"theory_lab {version['theory_lab']}, stream {version['stream']}" if "stream" in version else "nothing yet"
    is_cell = pc.equal(table.column("kind"), "cell")
    cells = pc.sum(is_cell).as_py() or 0
    packed = sum(len(pack.names) for pack in archive.packs)
    click.echo(f"{archive.path}: format {version['format']}, {made}")
    click.echo(
        f"{cells:,} cells and {len(table) - cells:,} pieces of studies, {packed:,} of them in "
        f"{len(archive.packs)} packs; "
        f"{_total(table, 'blocks'):,} blocks, {_total(table, 'trials'):,} trials; {archive.bytes() / 1e6:,.1f} MB"
    )


def _total(table: Any, name: str) -> int:
    return sum(value for value in table.column(name).to_pylist() if value is not None)


def _print_groups(table: Any) -> None:
    import pyarrow.compute as pc

    from theory_lab.render import _console, _table, length_text

    what = pc.coalesce(table.column("statistic"), table.column("study"))
    grouped = table.append_column("what", what).group_by(["kind", "what", "estimator", "noise"], use_threads=False)
    found = grouped.aggregate(
        [("cell", "count"), ("length", "min"), ("length", "max"), ("blocks", "sum"), ("trials", "sum")]
    ).sort_by([("kind", "ascending"), ("what", "ascending"), ("noise", "ascending"), ("estimator", "ascending")])
    columns = [("statistic or study", "l"), ("noise", "w"), ("estimator", "l"), ("cells", "r"), ("lengths", "r")]
    shown = _table(*columns, ("blocks", "r"), ("trials", "r"))
    from rich.markup import escape

    for row in found.to_pylist():
        low, high = (length_text(row[f"length_{end}"]) for end in ("min", "max"))
        shown.add_row(
            escape(row["what"] or "-"),
            escape(_short(row["noise"])),
            row["estimator"] or "-",
            f"{row['cell_count']:,}",
            low if low == high else f"{low} to {high}",
            f"{row['blocks_sum'] or 0:,}",
            f"{row['trials_sum'] or 0:,}",
        )
    _console().print(shown)


def _short(noise: str | None) -> str:
    """A law's name; that of a file is its content's hash, of which a few digits will do."""
    if noise is None:
        return "-"
    return noise if len(noise) <= 40 else f"{noise[:37]}..."


def _print_cells(table: Any, most: int | None) -> None:
    from rich.markup import escape

    from theory_lab.render import _console, _table, length_text, number

    order = [("statistic", "ascending"), ("noise", "ascending"), ("length", "ascending"), ("cell", "ascending")]
    found = table.sort_by(order).slice(0, most if most is not None else len(table))
    columns = [("cell", "l"), ("statistic or study", "l"), ("noise", "w"), ("estimator", "l"), ("length", "r")]
    constants = ("head_dim", "kappa", "beta", "sigma", "rho", "key_rho")
    shown = _table(*columns, *((name, "r") for name in constants), ("seed", "r"), ("trials", "r"))
    for row in found.to_pylist():
        shown.add_row(
            row["cell"],
            escape(row["statistic"] or row["study"] or "-"),
            escape(_short(row["noise"])),
            row["estimator"] or "-",
            length_text(row["length"]),
            *(number(row[name]) for name in constants),
            str(row["seed"]),
            "-" if row["trials"] is None else f"{row['trials']:,}",
        )
    _console().print(shown)
    if len(found) < len(table):
        click.echo(f"{len(table) - len(found):,} more: --full prints them all, --format csv for programs")


@command.command("show")
@click.argument("store", metavar="DIR")
@click.argument("what", metavar="CELL|CLAIM")
@click.option("--error", default="1e-3", show_default=True, metavar="NUMBER",
              help="Probability that a cell's interval misses.")  # fmt: skip
@_FORMAT
def show_command(store: str, what: str, error: str, form: str) -> None:
    """Show a cell, by the first digits of its name, or the rows of a claim.

    Peak memory: 165 MB, and 1.3 KB a cell.
    """
    from theory_lab.commands.parsing import one_number

    chance = one_number(error, "error")
    if not 0 < chance < 1:
        raise InputError("error", error, "a number between 0 and 1 is allowed")
    archive = _open(store)
    from theory_lab.catalog import CATALOG

    if what in CATALOG:
        _show_claim(archive, what, form)
        return
    _show_cell(archive, what, chance, form)


def _show_claim(archive: Archive, claim: str, form: str) -> None:
    from theory_lab import render

    rows = archive.rows()
    if "claim" not in rows:
        raise StoreError(f"store: {archive.path}; its rows.parquet is damaged: run the check again")
    rows = rows[rows.claim == claim]
    if rows.empty:
        raise InputError("what", claim, f"the last run in {archive.path} did not check it")
    if form == "json":
        click.echo(render.to_json(rows))
    elif form == "csv":
        from theory_lab.store.export import to_csv

        click.echo(to_csv(rows), nl=False)
    else:
        render._print_rows(render._console(), rows, [])


def _show_cell(archive: Archive, prefix: str, error: float, form: str) -> None:
    if len(prefix) < _SHORTEST_PREFIX or set(prefix) - set("0123456789abcdef"):
        raise InputError(
            "what", prefix, "a claim, or at least 4 digits of a cell's name, is allowed (theory-lab results ls --cells)"
        )
    found = archive.find(prefix)
    if len(found) != 1:
        names = ", ".join(places[0].name for places in found[:3])
        raise InputError(
            "what", prefix, f"it names {len(found)} cells ({names}, ...)" if found else "no cell's name begins so"
        )
    about = _describe(archive, found[0], error)
    if form == "json":
        import json

        click.echo(json.dumps(about, indent=1))
    elif form == "csv":
        import pandas as pd

        from theory_lab.store.export import to_csv

        click.echo(to_csv(pd.json_normalize(about)), nl=False)
    else:
        for name, value in about.items():
            if isinstance(value, dict):
                value = ", ".join(f"{key} {part}" for key, part in value.items() if part is not None)
            click.echo(f"{name + ':':<16} {value}")


def _describe(archive: Archive, places: list[Place], error: float) -> dict[str, Any]:
    """A cell or piece in full; StoreError if no copy of it is sound."""
    from theory_lab.store.cells import DamagedError

    name = places[0].name
    about: dict[str, Any] = {"cell": name, "in": " and ".join(place.text for place in places)}
    problems = []
    table, said = None, None
    for place in places:
        try:
            if not place.is_cell():
                found = place.findings()
                provenance = {k: found[k] for k in found if k not in ("findings", "piece", "seed", "checksum")}
                kept = {"study": found["piece"][0], "seed": found["seed"], "arguments": dict(found["piece"][1])}
                return {
                    **about,
                    **kept,
                    "findings": len(found["findings"]),
                    "made by": provenance,
                    "checksum": "agrees",
                }
            one, said = place.read()
            table = one if table is None else table.longest(one)
        except DamagedError as damage:
            problems.append(str(damage))
    if table is None or said is None:
        raise StoreError(f"store: {archive.path}; {'; '.join(problems)}")
    summary = table.summary()
    about |= {"seed": said["seed"], **said["cell"]}
    about |= {"blocks": summary.blocks, "trials": summary.trials, "seconds": archive.seconds().get(name)}
    about |= _estimate(said, table, error)
    about["made by"] = {k: said[k] for k in said if k not in ("cell", "seed", "checksum")}
    about["checksum"] = "agrees" if not problems else f"agrees; but {'; '.join(problems)}"
    return about


def _estimate(said: dict[str, Any], table: Any, error: float) -> dict[str, Any]:
    """Estimate, standard error and interval of a cell; why not, if its law is not at hand."""
    from theory_lab.claims import Point
    from theory_lab.estimation import Cell, sampler
    from theory_lab.estimation.intervals import interval

    identity = {key: value for key, value in said["cell"].items() if key not in ("statistic", "estimator", "stream")}
    try:
        cell = Cell(said["cell"]["statistic"], Point(**identity), said["cell"]["estimator"], said["seed"])
        sample = sampler(cell).pool(cell, table.blocks())
        ends = interval(sample, error)
    except (InputError, TypeError, KeyError):
        return {"estimate": f"not without the scores that the law {_short(identity.get('noise'))} was made of"}
    return {
        "estimate": sample.estimate,
        "standard_error": sample.standard_error,
        "ci_low": ends.low,
        "ci_high": ends.high,
        "ci_error": error,
        "method": ends.method,
    }


@command.command("compact")
@click.argument("store", metavar="DIR")
@click.option("--quiet", is_flag=True, help="No progress.")
def compact_command(store: str, quiet: bool) -> int:
    """Put all cells into packs: few large Parquet files. Runs may go on meanwhile.

    Exit code: 0 done, 1 something damaged was left out, 2 bad usage.

    Peak memory: 130 MB, and 1.7 KB a cell.
    """
    archive = _open(store)
    from theory_lab.progress import make_progress
    from theory_lab.store.compact import compact

    show = make_progress(quiet, "packing", "files")
    started = [False]

    def tell(done: int, of: int) -> None:
        if not started[0]:
            show.start(of, 0, float(of))
            started[0] = True
        show.advance(1, 1.0)

    try:
        done = compact(archive.path, tell=tell)
    except OSError as error:
        raise StoreError(f"store: {store}; it cannot be packed ({error.strerror or error}); nothing is lost") from error
    finally:
        show.stop()
    if done.busy:
        raise StoreError(f"store: {store}; another process is packing it")
    for problem in done.damaged:
        click.echo(f"theory-lab: {problem}; left out", err=True)
    click.echo(
        f"packed {done.cells:,} cells and pieces, {done.rows:,} blocks; "
        f"{done.loose:,} files and {done.packs} packs went in"
    )
    return _DAMAGED if done.damaged else 0


@command.command("verify")
@click.argument("store", metavar="DIR")
@click.option("--drop", is_flag=True, help="Move what is damaged into DIR/set-aside, so that --resume draws it again.")
@click.option("--quiet", is_flag=True, help="No progress.")
def verify_command(store: str, drop: bool, quiet: bool) -> int:
    """Check every cell against its checksum, and name what is damaged.

    Exit code: 0 all sound, 1 something is damaged, 2 bad usage.

    Peak memory: 130 MB, and 1.4 KB a cell.
    """
    archive = _open(store)
    from theory_lab.progress import make_progress
    from theory_lab.store.archive import Damage

    show = make_progress(quiet, "verifying", "files")
    total = len(archive.loose()) + sum(len(pack.names) for pack in archive.packs)
    show.start(total, 0, float(total))
    sound, damaged = 0, []
    try:
        for found in archive.verify():
            if isinstance(found, Damage):
                damaged.append(found)
            else:
                sound += 1
            show.advance(1, 1.0)
    finally:
        show.stop()
    for item in damaged:
        click.echo(f"damaged: {item.where}: {item.what}")
    click.echo(f"{sound:,} sound, {len(damaged)} damaged")
    if drop and damaged:
        _drop(archive, damaged)
    return _DAMAGED if damaged else 0


def _drop(archive: Archive, damaged: list[Any]) -> None:
    """Put damaged files aside; packs are written anew without their damaged cells."""
    from theory_lab.store.compact import SET_ASIDE, compact

    aside = archive.path / SET_ASIDE
    try:
        aside.mkdir(exist_ok=True)
        for item in damaged:
            if item.path.parent.name != "packs" and item.path.exists():
                os.replace(item.path, aside / item.path.name)
        if any(item.path.parent.name == "packs" for item in damaged):
            compact(archive.path, check=True)
    except OSError as error:
        raise StoreError(f"store: {archive.path}; it cannot be written ({error.strerror or error})") from error
    click.echo(
        f"put aside: {Path(aside)}; theory-lab check --out {archive.path} --resume draws again what is missing",
        err=True,
    )


@command.command("export")
@click.argument("store", metavar="DIR")
@click.option("--to", "target", required=True, metavar="FILE", help="File to write: .csv, .parquet or .json.")
@click.option("--what", default="rows", show_default=True, type=click.Choice(["rows", "cells", "blocks"]),
              help="Rows of the last run, cells with their sums, or every block.")  # fmt: skip
def export_command(store: str, target: str, what: str) -> None:
    """Write rows, cells or blocks to a file for other programs.

    In CSV a text that a spreadsheet would run as a formula gets an apostrophe before it.

    Peak memory: 130 MB, and 1.5 KB a cell; 100 MB more for blocks.
    """
    archive = _open(store)
    from theory_lab.store.export import export

    click.echo(f"{export(archive, target, what):,} {what}: {target}", err=True)


@command.command("migrate")
@click.argument("store", metavar="DIR")
def migrate_command(store: str) -> int:
    """Bring a folder of an older format or version here; every block keeps its bits.

    Peak memory: 125 MB.
    """
    _open(store)
    from theory_lab.store.migrate import migrate

    done = migrate(store)
    for problem in done.damaged:
        click.echo(f"theory-lab: {problem}; left as it is", err=True)
    before = done.before
    click.echo(
        f"{store}: was format {before['format']}, theory_lab {before.get('theory_lab', '-')}; "
        f"{done.rewritten:,} cell files brought to the present format"
    )
    return _DAMAGED if done.damaged else 0
