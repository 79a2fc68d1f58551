"""Rows as tables for people, and as JSON and CSV for programs."""

from __future__ import annotations

import json
import math
import numbers
import os
import sys
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from theory_lab.outside import defused_frame, visible

if TYPE_CHECKING:
    import pandas as pd

    from theory_lab.claims.base import Statement
    from theory_lab.experiments import Settings
    from theory_lab.noise import Family

_MOST_ROWS = 60
_LOG_WIDTH = 170
_STYLES = {"HOLDS": "green", "VIOLATED": "bold red", "INCONCLUSIVE": "yellow"}
_CONSTANTS = ("head_dim", "kappa", "beta", "sigma", "rho", "key_rho")
_WORDS = {
    "any": "any law (worst case)",
    "head_dim": "d",
}


def plain(text: object) -> str:
    """Text from outside for a table: no markup, and nothing that acts on a terminal."""
    return escape(visible(text))


def to_json(rows: pd.DataFrame) -> str:
    """One array of rows; what has no value is null."""
    records = [{k: _plain(v) for k, v in row.items()} for row in rows.to_dict("records")]
    return json.dumps(records, indent=1, allow_nan=False)


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        value = value.item()
    if type(value).__name__ == "NAType":
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def to_csv(rows: pd.DataFrame) -> str:
    """Comma-separated values with a header; numbers in full precision, and no text that a spreadsheet would run."""
    return defused_frame(rows).to_csv(index=False)


def number(value: float | None) -> str:
    """Four significant digits; what is just below 1 by its distance from it."""
    if value is None or math.isnan(value):
        return "-"
    if value == 0:
        return "0"  # and not -0
    if 0.9999 < value < 1.0 and 1.0 - value > 1e-14:
        return f"1 - {1.0 - value:.1e}"
    return f"{value:.4g}"


def length_text(n: Any) -> str:
    """A power of two as such from 4096 on, other lengths with separators; limits have none."""
    if not isinstance(n, numbers.Integral):
        return "-"
    n = int(n)
    return f"2^{n.bit_length() - 1}" if n >= 4096 and n & (n - 1) == 0 else f"{n:,}"


def _console() -> Console:
    # Without a terminal rich assumes 80 columns and would cut the table.
    if sys.stdout.isatty():
        return Console(highlight=False)
    columns = os.environ.get("COLUMNS", "")
    return Console(width=int(columns) if columns.isascii() and columns.isdigit() and int(columns) else _LOG_WIDTH,
                   highlight=False)  # fmt: skip


def _table(*columns: tuple[str, str], title: str = "") -> Table:
    table = Table(box=SIMPLE_HEAD, title=plain(title) or None, title_justify="left", pad_edge=False)
    for name, side in columns:
        table.add_column(plain(name), justify="right" if side == "r" else "left", no_wrap=side != "w", overflow="fold")
    return table


def print_table(rows: pd.DataFrame, settings: Settings, full: bool = False) -> None:
    """Print the rows, or one line a claim and noise family where there are more than 60."""
    console = _console()
    if rows.empty:
        console.print("no rows")
        return
    # A study's subject says what varies in it.
    theorems = rows[rows.estimator != "study"]
    constants = [name for name in _CONSTANTS if theorems[name].nunique() > 1]
    if full or len(rows) <= _MOST_ROWS:
        _print_rows(console, rows, constants)
    else:
        _print_summary(console, rows, constants)
    _print_notes(console, rows, settings)


def _cells(row: Any, constants: list[str]) -> list[str]:
    mark = "" if row.assumptions == "met" else " †"
    noise = _WORDS.get(row.noise, row.noise) + mark
    return [row.claim, plain(noise), *(number(getattr(row, name)) for name in constants)]


def _verdict(text: str, label: str = "") -> str:
    return f"[{_STYLES[text]}]{label or text}[/]"


def _fields(row: Any, verdict: str) -> dict[str, str]:
    """What a line can show, by column title."""
    sure = row.estimator == "study" and row.ci_low == row.ci_high
    return {
        "estimator": row.estimator,
        "estimate": number(row.estimate),
        # What a search or a closed form found has no interval.
        "interval": "-" if sure else f"{number(row.ci_low)} to {number(row.ci_high)}",
        "trials": f"{row.trials:,}",
        "exact": number(row.exact),
        "bound": number(row.bound),
        "estimate/bound": "-" if row.estimator == "study" and row.bound < 1e-6 else number(row.slack),
        "verdict": verdict,
        "note": plain("; ".join(text for text in (row.assumptions, row.note) if text not in ("", "met"))),
    }


#: Columns to show for studies alone.
_STUDY_LAYOUT = ("trials", "estimate", "interval", "exact", "bound", "estimate/bound", "verdict")

#: Columns to show, from a wide terminal to a narrow one.
_LAYOUTS = (
    ("estimator", "estimate", "interval", "exact", "bound", "estimate/bound", "verdict"),
    ("estimate", "interval", "exact", "bound", "estimate/bound", "verdict"),
    ("estimate", "interval", "bound", "verdict"),
    ("estimate", "bound", "verdict"),
    ("estimate/bound", "verdict"),
    ("verdict",),
)


def _print_widest(
    console: Console, lines: list[tuple[list[str], dict[str, str]]], head: list[tuple[str, str]], notes: bool = False
) -> None:
    """Print the first layout that fits; a claim's lines are set apart from the next one's."""
    noted = notes and any(fields["note"] for _, fields in lines)
    widest = _STUDY_LAYOUT if all(fields["estimator"] == "study" for _, fields in lines) else _LAYOUTS[1]
    layouts = [*([(*widest, "note")] if noted else []), *([widest] if widest is _STUDY_LAYOUT else []), *_LAYOUTS]
    for layout in layouts:
        sides = [(name, {"note": "w", "estimator": "l", "verdict": "l"}.get(name, "r")) for name in layout]
        columns = [*zip(*(cells for cells, _ in lines), strict=True)]
        columns += [tuple(fields[name] for _, fields in lines) for name in layout]
        widest_row = _table(*head, *sides)
        widest_row.add_row(*(max(column, key=_width) for column in columns))
        # Measured without the terminal's own limit, which would hide that something is cut.
        wanted = Measurement.get(console, console.options.update(width=1000), widest_row).maximum
        # A note wraps; it needs some room, not all that its text would take.
        if "note" in layout:
            wanted = wanted - max(len(fields["note"]) for _, fields in lines) + 40
        if wanted <= console.width or layout == _LAYOUTS[-1]:
            table = _table(*head, *sides)
            for index, row in enumerate(zip(*columns, strict=True)):
                if index and row[0] != columns[0][index - 1]:
                    table.add_section()
                table.add_row(*row)
            console.print(table)
            return


def _width(text: str) -> int:
    """Columns that a cell's text takes."""
    return len(text) if text.isascii() and "[" not in text else Text.from_markup(text).cell_len


def _print_rows(console: Console, rows: pd.DataFrame, constants: list[str]) -> None:
    head = [("claim", "l"), ("noise", "l"), *((_WORDS.get(name, name), "r") for name in constants), ("keys n", "r")]
    lines = []
    for record in rows.itertuples():
        row: Any = record
        lines.append(([*_cells(row, constants), length_text(row.length)], _fields(row, _verdict(row.verdict))))
    _print_widest(console, lines, head, notes=True)


def _tightest(group: pd.DataFrame) -> Any:
    """Label of the row that comes closest to its bound; a bound of 0 is exceeded by anything above it."""
    excess = group.estimate - group.bound
    return group.slack.idxmax() if group.slack.notna().all() else excess.idxmax()


def _print_summary(console: Console, rows: pd.DataFrame, constants: list[str]) -> None:
    apart, folded = list(constants), []
    # Constants of many values would take a line each: like the length, they are told where the bound is closest.
    while apart and rows.groupby(["claim", "noise", *apart], sort=False, dropna=False).ngroups > _MOST_ROWS:
        folded.append(max(apart, key=lambda name: rows[name].nunique()))
        apart.remove(folded[-1])
    folded = [name for name in constants if name in folded]
    head = [
        ("claim", "l"),
        ("noise", "l"),
        *((_WORDS.get(name, name), "r") for name in apart),
        *((f"at {_WORDS.get(name, name)}", "r") for name in folded),
        ("at n", "r"),
    ]
    lines = []
    for _, group in rows.groupby(["claim", "noise", *apart], sort=False, dropna=False):
        row: Any = next(group.loc[[_tightest(group)]].itertuples())
        worst = next(v for v in ("VIOLATED", "INCONCLUSIVE", "HOLDS") if (group.verdict == v).any())
        count = int((group.verdict == worst).sum())
        label = f"{worst} {count} of {len(group)}"
        lines.append(([*_cells(row, apart + folded), length_text(row.length)], _fields(row, _verdict(worst, label))))
    _print_widest(console, lines, head)
    where = ", ".join(_WORDS.get(name, name) for name in folded)
    console.print(
        f"One line for each claim and noise: the numbers at the {where + ' and ' if where else ''}length n where the "
        "estimate comes closest to the bound (- for a limit), and how many rows have the worst verdict. "
        f"--full prints all {len(rows)} rows"
        f"{', --format csv writes them.' if folded else '.'}",
        soft_wrap=True,
    )


def _print_notes(console: Console, rows: pd.DataFrame, settings: Settings) -> None:
    from theory_lab.catalog import find

    fixed = [f"{_WORDS.get(n, n)} = {number(rows[n].dropna().iloc[0])}" for n in (*_CONSTANTS, "lambda")
             if rows[n].nunique() == 1 and (n != "key_rho" or rows[n].dropna().iloc[0] != 0)]  # fmt: skip
    names = list(dict.fromkeys(rows.claim))
    lines = [f"{name}: {find(name).bound_text} ({find(name).source})" for name in names]
    counts = ", ".join(f"{(rows.verdict == v).sum()} {v}" for v in _STYLES if (rows.verdict == v).any())
    theorems = rows[(rows.trials > 0) & (rows.estimator != "study")]
    studies = rows[(rows.standard_error > 0) & (rows.estimator == "study") & (rows.method != "trend")]
    errors = [_precision(theorems, ""), _precision(studies, " of a study")]
    error = "; ".join(text.strip() for text in errors if text) or "no random estimate"
    scale = f" Bounds are scaled by {number(settings.bound_scale)}." if settings.bound_scale != 1 else ""
    lines += [
        f"Constants: {', '.join(fixed) or 'none'}. Seed {settings.seed}; {error.strip()}.{scale}",
        f"Verdicts: {counts}. VIOLATED: the interval lies above the bound; HOLDS: its upper end is at most "
        f"{1 + settings.tolerance:g} x bound (tolerance {settings.tolerance:g}). The chance that any verdict on "
        f"random draws here is wrong is at most {settings.alpha:g} (Holm).",
    ]
    if rows.method.isin(["student", "trend"]).any():
        lines.append("Intervals of the methods student and trend (fitted limits, and crowded rows) are asymptotic.")
    outside = rows[rows.assumptions != "met"]
    searches = rows[(rows.estimator == "study") & (rows.method != "trend") & ~(rows.standard_error > 0)]
    if len(searches):
        lines.append(
            "What searches and closed forms found has no interval; HOLDS of a search says that none of its cases is a "
            "counterexample, not that there is none."
        )
    undecided = rows[rows.verdict == "INCONCLUSIVE"]
    for record in undecided.head(10).itertuples():
        row: Any = record
        found = f"{number(row.ci_low)} to {number(row.ci_high)} against {number(row.bound)}"
        lines.append(f"INCONCLUSIVE: {row.claim}, {row.noise}, n = {length_text(row.length)}: {found}")
    refuted = rows[(rows.assumptions == "met") & (rows.verdict == "VIOLATED") & (rows.note != "")]
    lines += [f"VIOLATED: {row.claim}, {row.noise}: {row.note}" for row in refuted.head(10).itertuples()]
    if len(outside):
        every = list(dict.fromkeys("; ".join(outside.assumptions).split("; ")))
        reasons = "; ".join(every[:3]) + (f"; and {len(every) - 3} more, see --full" if len(every) > 3 else "")
        bad = int((outside.verdict == "VIOLATED").sum())
        lines.append(
            f"† outside the claim's assumptions ({reasons}): a control. {bad} of {len(outside)} such rows are "
            "VIOLATED, which does not refute the claim."
        )
        inside = int(((rows.assumptions == "met") & (rows.verdict == "VIOLATED")).sum())
        lines.append(f"Where the assumptions are met, {inside or 'no'} row{'' if inside == 1 else 's'} "
                     f"{'is' if inside == 1 else 'are'} VIOLATED.")  # fmt: skip
    for line in lines:
        console.print(visible(line), soft_wrap=True, markup=False)


def _precision(rows: pd.DataFrame, what: str) -> str:
    """Largest relative standard error of some rows, in words."""
    if rows.empty:
        return ""
    relative = rows.relative_error.max()
    if math.isnan(relative):
        return f"no event seen in any row{what}"
    blind = int(rows.relative_error.isna().sum())
    return f" largest relative standard error{what} {relative:.2%}" + (
        f", apart from {blind} rows that saw no event" if blind else ""
    )


def print_claims(claims: list[Statement]) -> None:
    """List claims; a narrow terminal gets their names and bounds alone."""
    console = _console()
    wide = console.width >= 120
    columns = [("claim", "l"), ("kind", "l"), ("source", "w"), ("bound", "w"), ("exact value", "w")]
    table = _table(*(columns if wide else (columns[0], columns[3])))
    table.columns[0].min_width = max(len(claim.id) for claim in claims)
    for claim in claims:
        cells = (claim.id, claim.kind, claim.source, claim.bound_text, claim.exact_text)
        table.add_row(*map(escape, cells if wide else (cells[0], cells[3])))
    console.print(table)


def print_claim(claim: Statement) -> None:
    """Print a claim in full."""
    from theory_lab.claims import Claim

    console = _console()
    lines = [
        ("claim", claim.id),
        ("source", claim.source),
        ("kind", claim.kind),
        ("statement", claim.statement),
        ("bound", claim.bound_text),
    ]
    if isinstance(claim, Claim):
        counts = {
            "survivors": "S_i, keys of row i whose score exceeds tau_i",
            "consensus": "C_i, keys of row i that exceed tau_i in both views",
        }
        lines += [
            ("statistic", counts[claim.statistic]),
            ("threshold", "tau_i = beta sqrt(2 max(0, log(n / kappa)) / d), n = i + 1 visible keys"),
        ]
    lines += [("assumes", text) for text in claim.assumptions]
    lines += [
        ("exact value", claim.exact_text),
        ("depends on", ", ".join(claim.parameters) or "nothing that can be set"),
    ]
    for name, text in lines:
        console.print(f"{name:12} {text}", soft_wrap=True, markup=False)


def print_families(families: list[Family]) -> None:
    """List noise families."""
    table = _table(("family", "l"), ("sub-Gaussian", "l"), ("what it is", "w"))
    for family in families:
        table.add_row(plain(family.name), "yes" if family.sub_gaussian else "no (control)", plain(family.summary))
    table.add_row("file:PATH", "estimated", "scores from a .npy, .csv or .parquet file, rescaled to the proxy")
    table.add_row("file:PATH,raw", "estimated", "the same scores as they are")
    table.add_row("model:NAME", "estimated", "cosines of unrelated tokens in a trained model; layer=, head=, raw")
    table.add_row("any", "all of them", "every law with the proxy: the worst case, between a witness and a certificate")
    console = _console()
    console.print(table)
    console.print("Parameters go after a colon or in parentheses: student-t:5, 'beta(0.5)', truncated-normal:3.")


def print_family(family: Family) -> None:
    """Measure one family at sigma = 1, d = 64."""
    from theory_lab.noise import Scale
    from theory_lab.noise.empirical import Empirical

    console = _console()
    d = 64
    law = family.scaled(Scale(1 / d, d, math.sqrt(2 * math.log(1000) / d)))
    proxy = "none" if law.proxy is None else f"{number(law.proxy * d)} / d"
    console.print(visible(f"{family.name}: {family.summary}"), markup=False, soft_wrap=True)
    console.print(f"scaled to sigma = 1, d = {d}: variance {number(law.variance * d)} / d, optimal proxy {proxy}")
    if isinstance(family, Empirical):
        found = family.bootstrap
        console.print(
            f"estimated proxy of the scores as they are: {number(found.value)} (95% bootstrap interval "
            f"{number(found.ci_low)} to {number(found.ci_high)}, {found.resamples} resamples)",
            soft_wrap=True,
        )
    table = _table(("keys n", "r"), ("threshold tau", "r"), ("P(X > tau)", "r"), ("E[survivors]", "r"))
    for n in (2, 10, 100, 1000, 10**4, 10**6, 10**9):
        tau = math.sqrt(2 * math.log(n) / d)
        p = family.scaled(Scale(1 / d, d, tau)).tail(tau)
        table.add_row(length_text(n), number(tau), number(p), number(n * p))
    console.print(table)
