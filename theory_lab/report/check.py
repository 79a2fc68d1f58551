"""The section of a check: what holds, its pictures, every row, and how to repeat it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from theory_lab.claims.base import Statement
from theory_lab.errors import InputError
from theory_lab.render import length_text, number
from theory_lab.report.parts import Cell, Column, Picture, Section, Table
from theory_lab.report.pictures import draw
from theory_lab.report.sources import Source

if TYPE_CHECKING:
    import pandas as pd

_CONSTANTS = {"head_dim": "d", "kappa": "κ", "beta": "β", "sigma": "σ", "rho": "ρ", "key_rho": "key ρ", "lambda": "λ"}
_MOST_NAMES = 8
_WORST_FIRST = ("VIOLATED", "INCONCLUSIVE", "HOLDS")
_WORDS = {"HOLDS": "holds", "VIOLATED": "is violated", "INCONCLUSIVE": "is undecided"}


def check_section(source: Source, pictures: bool, say: Callable[[str], None]) -> Section:
    """The section of rows of a check.

    Parameters
    ----------
    source : Source
        Rows of kind ``check``.
    pictures : bool
        Whether to draw them: tables alone need none.
    say : callable
        Told each picture before it is drawn.
    """
    rows = source.rows
    return Section(
        title=f"Check: {source.name}",
        lead=tuple(_lead(rows, source.about)),
        overview=(_overview(rows),),
        pictures=tuple(_pictures(rows, say)) if pictures else (),
        tables=(_table(rows),),
        command=command_line(source.about.get("settings")),
        settings=tuple(_settings(rows, source.about)),
    )


def _statement(claim: str) -> Statement | None:
    from theory_lab.catalog import find

    try:
        return find(claim)
    except InputError:  # someone's own claim, which this installation does not know
        return None


def _worst(rows: pd.DataFrame) -> str:
    return next((v for v in _WORST_FIRST if (rows.verdict == v).any()), "")


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _names(names: list[str]) -> str:
    names = ["any law (worst case)" if name == "any" else name for name in names]
    more = len(names) - _MOST_NAMES
    mark = "; " if any("," in name for name in names) else ", "
    return mark.join(names[:_MOST_NAMES]) + (f"{mark}and {more} more" if more > 0 else "")


def _lead(rows: pd.DataFrame, about: dict[str, Any]) -> Iterator[str]:
    met = rows[rows.assumptions == "met"]
    by_verdict: dict[str, list[str]] = {}
    for claim, group in met.groupby("claim", sort=False):
        by_verdict.setdefault(_worst(group), []).append(str(claim))
    count = sum(map(len, by_verdict.values()))
    parts = []
    if by_verdict.get("HOLDS"):
        parts.append(f"{len(by_verdict['HOLDS'])} of {_count(count, 'claim')} hold in every setting tried that meets "
                     "their assumptions")  # fmt: skip
    if by_verdict.get("VIOLATED"):
        parts.append(f"violated: {', '.join(by_verdict['VIOLATED'])}")
    if by_verdict.get("INCONCLUSIVE"):
        parts.append(f"undecided somewhere: {', '.join(by_verdict['INCONCLUSIVE'])}")
    answer = "; ".join(parts or ["no row meets the assumptions of its claim"])
    yield answer[0].upper() + answer[1:] + "."
    controls = rows[rows.assumptions != "met"]
    if len(controls):
        bad = int((controls.verdict == "VIOLATED").sum())
        yield (
            f"{len(controls):,} of {_count(len(rows), 'row')} are controls, marked †: noise, constants or mechanisms "
            f"that a claim excludes. {bad:,} of them are violated, which does not refute the claim; it shows that the "
            "check can fail."
        )
    settings = about.get("settings")
    tolerance = settings.get("tolerance") if isinstance(settings, dict) else None
    margin = f"{1 + tolerance:g} × bound" if isinstance(tolerance, float) else "the bound and its tolerance"
    text = (
        f"A row HOLDS if the upper end of its interval is at most {margin}, is VIOLATED if the lower end exceeds the "
        "bound, and is INCONCLUSIVE otherwise: draw more."
    )
    alpha = settings.get("alpha") if isinstance(settings, dict) else None
    if isinstance(alpha, float):
        text += f" The chance that any verdict on random draws here is wrong is at most {alpha:g} (Holm)."
    yield text
    if _searches(rows).any():
        yield (
            "What searches and closed forms found has no interval; a search that HOLDS says that none of its cases is "
            "a counterexample, not that there is none."
        )
    if rows.method.isin(["student", "trend"]).any():
        yield "Intervals of the methods student and trend (fitted limits, crowded rows) are asymptotic."


def _searches(rows: pd.DataFrame) -> pd.Series[bool]:
    return (rows.estimator == "study") & (rows.method != "trend") & ~(rows.standard_error > 0)


def _overview(rows: pd.DataFrame) -> Table:
    columns = (
        Column("claim"), Column("what is checked", "note"), Column("verdict", "verdict"), Column("holds", "number"),
        Column("violated", "number"), Column("undecided", "number"), Column("controls violated", "number"),
        Column("largest estimate / bound", "number"),
    )  # fmt: skip
    lines = []
    for claim, group in rows.groupby("claim", sort=False):
        met, controls = group[group.assumptions == "met"], group[group.assumptions != "met"]
        statement = _statement(str(claim))
        counts = [int((met.verdict == v).sum()) for v in ("HOLDS", "VIOLATED", "INCONCLUSIVE")]
        bad = int((controls.verdict == "VIOLATED").sum())
        # A bound that is next to 0 makes a ratio that says nothing.
        tight = met.slack[met.bound.abs() >= 1e-6]
        largest = float(tight.max()) if len(tight) else float("nan")
        lines.append(
            (
                Cell(str(claim), target=f"picture of {claim}"),
                Cell(statement.bound_text if statement else "not known to this installation"),
                Cell(_worst(met) or "controls only"),
                *(Cell(f"{count:,}", float(count)) for count in counts),
                Cell(f"{bad:,} of {len(controls):,}" if len(controls) else "-", float(bad) if len(controls) else None),
                _number(largest),
            )
        )
    words = "Where a claim's assumptions are met: rows by verdict, and how close the closest row comes to the bound "
    return Table("At a glance", columns, lines, words + "(1 is tight).")


def _number(value: Any) -> Cell:
    return Cell(number(value), float(value) if value == value else None)


def _length(value: float) -> Cell:
    whole = int(value) if value == value and value == int(value) else None
    return Cell(length_text(whole), None if whole is None else float(value))


def _table(rows: pd.DataFrame) -> Table:
    # A study's subject says what varies in it.
    theorems = rows[rows.estimator != "study"]
    varying = [name for name in _CONSTANTS if theorems[name].nunique() > 1]
    columns = (
        Column("claim", chosen=True), Column("noise or subject"), Column("keys n", "number"),
        *(Column(_CONSTANTS[name], "number") for name in varying), Column("verdict", "verdict", chosen=True),
        Column("estimate", "number"), Column("interval", "number"), Column("exact", "number"),
        Column("bound", "number"), Column("estimate / bound", "number"), Column("trials", "number"),
        Column("how", "note"), Column("note", "note"),
    )  # fmt: skip
    sure = _searches(rows) & (rows.ci_low == rows.ci_high)
    lines = []
    for record, certain in zip(rows.itertuples(), sure, strict=True):
        row: Any = record
        control = row.assumptions != "met"
        ratio = float("nan") if row.estimator == "study" and abs(row.bound) < 1e-6 else row.slack
        interval = Cell("-") if certain else Cell(f"{number(row.ci_low)} to {number(row.ci_high)}", float(row.ci_low))
        how = row.method if row.estimator == "study" else f"{row.estimator}, {row.method}"
        lines.append(
            (
                Cell(row.claim),
                Cell(("any law (worst case)" if row.noise == "any" else row.noise) + (" †" if control else "")),
                _length(row.length),
                *(_number(rows.at[row.Index, name]) for name in varying),
                Cell(row.verdict),
                _number(row.estimate),
                interval,
                _number(row.exact),
                _number(row.bound),
                _number(ratio),
                Cell(f"{int(row.trials):,}" if row.trials == row.trials else "-", row.trials),
                Cell(how),
                Cell("; ".join(text for text in (row.assumptions if control else "", row.note) if text)),
            )
        )
    fixed = [f"{_CONSTANTS[n]} = {number(rows[n].dropna().iloc[0])}" for n in _CONSTANTS if rows[n].nunique() == 1]
    caption = f"Constants where a claim depends on them: {', '.join(fixed)}. " if fixed else ""
    caption += (
        "† marks controls. Estimates and intervals are of the claim's statistic; exact is a closed form or quadrature, "
        "a cross-check that enters no verdict."
    )
    return Table("Every row", columns, lines, caption, long=True)


def _pictures(rows: pd.DataFrame, say: Callable[[str], None]) -> Iterator[Picture]:
    from theory_lab.figures.check_plot import plot_check

    for name, group in rows.groupby("claim", sort=False):
        claim = str(name)
        say(f"drawing {claim}")
        drawn = group.reset_index(drop=True)
        content, why = draw(partial(plot_check, drawn))
        title = claim
        statement = _statement(claim)
        if statement is not None:
            title = f"{claim} ({statement.source})"
        yield Picture(f"picture of {claim}", title, why or caption(group, statement), content)


def caption(rows: pd.DataFrame, statement: Statement | None) -> str:
    """What a claim's picture shows, in plain words: the claim, how to read it, what came out."""
    from theory_lab.figures.check_plot import _is_search

    said = [statement.statement.rstrip(".") + "."] if statement is not None else []
    if _is_search(rows):
        said.append(
            "Each line is a search or a closed form and ends at the worst that it found, as a distance from the bound: "
            "left of 0 the claim holds, right of 0 it does not."
        )
    else:
        said.append(
            "Dots are estimates, bars their intervals, thin lines exact values where there are any; the dashed line is "
            "the bound."
        )
    met, controls = rows[rows.assumptions == "met"], rows[rows.assumptions != "met"]
    said += _outcomes(met, "The claim")
    if len(controls):
        said += _outcomes(controls, "Outside its assumptions it")
    return " ".join(said)


def _outcomes(rows: pd.DataFrame, subject: str) -> list[str]:
    groups: dict[str, list[str]] = {}
    for noise, group in rows.groupby("noise", sort=False):
        groups.setdefault(_worst(group), []).append(str(noise))
    parts = [f"{_WORDS[v]} for {_names(groups[v])}" for v in reversed(_WORST_FIRST) if v in groups]
    return [f"{subject} {'; it '.join(parts)}."] if parts else []


def command_line(settings: object) -> str:
    """The command that draws the same rows; empty if the settings are not known.

    Parameters
    ----------
    settings : object
        What :meth:`theory_lab.settings.Settings.describe` wrote beside the rows.
    """
    if not isinstance(settings, dict):
        return ""
    words = ["theory-lab", "check", *map(str, settings.get("claims") or ())]
    for noise in settings.get("noise") or ():
        words += ["--noise", str(noise)]
    for name in ("length", "kappa", "beta", "sigma", "rho", "key_rho", "lam", "head_dim"):
        values = settings.get(name)
        if values:
            flag = "--lambda" if name == "lam" else "--" + name.replace("_", "-")
            words += [flag, ",".join(map(_plain, values))]
    defaults = {
        "trials": None,
        "estimator": "auto",
        "device": "cpu",
        "seed": 0,
        "alpha": 1e-3,
        "tolerance": 0.01,
        "bound_scale": 1.0,
    }
    for name, default in defaults.items():
        value = settings.get(name, default)
        if value != default or name == "seed":
            words += ["--" + name.replace("_", "-"), _plain(value)]
    budget = settings.get("budget")
    if isinstance(budget, dict):
        for name, unit in (("seconds", "s"), ("trials", "")):
            if name in budget:
                words += ["--budget", f"{_plain(budget[name])}{unit}"]
    return shlex.join(words)


def _plain(value: object) -> str:
    return str(int(value)) if isinstance(value, float) and value == int(value) and abs(value) < 1e15 else str(value)


def _settings(rows: pd.DataFrame, about: dict[str, Any]) -> Iterator[tuple[str, str]]:
    def distinct(name: str) -> str:
        return ", ".join(map(str, rows[name].unique()))

    yield "seed", distinct("seed")
    yield "device", distinct("device")
    yield "theory-lab", distinct("version")
    for name in ("commit", "numpy", "scipy", "pandas"):
        if about.get(name):
            yield name, str(about[name])
    if about.get("stream"):
        yield "random streams", f"version {about['stream']}"
    if not isinstance(about.get("settings"), dict):
        yield "settings", "not stored in this file; theory-lab check --out DIR keeps them"
    yield "rows", f"{len(rows):,}"
