"""Audit of a paper: its own tables held against its own statements and against what the toolkit measures.

Tables and statements are data, ``experiments/<paper>/tables.toml``; a verdict is always computed from them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from theory_lab.audit_checks import AGREES, CONTRADICTS, NOT_MEASURED, PRINTED_KINDS, UNDECIDED, Check, Tables
from theory_lab.audit_data import Entry, Table, read_table, read_toml
from theory_lab.audit_measure import CannotMeasure, read_measured
from theory_lab.errors import InputError

#: Columns of an audit.
COLUMNS = ("paper", "statement", "source", "check", "printed", "computed", "verdict", "note")

#: Verdicts, the most important first.
VERDICTS = (CONTRADICTS, UNDECIDED, NOT_MEASURED, AGREES)

#: Every kind of check.
KINDS: dict[str, Callable[[Entry, Tables], Check]] = {**PRINTED_KINDS, "measured": read_measured}

_FILE = "tables.toml"


@dataclass(frozen=True)
class Statement:
    """One sentence of a paper or its summary, paraphrased, with the check that decides it."""

    id: str
    text: str
    source: str
    note: str
    check: Check


@dataclass(frozen=True)
class Paper:
    """What one file of the experiments folder holds."""

    id: str
    title: str
    tables: dict[str, Table]
    statements: tuple[Statement, ...]


def experiments_dir() -> Path:
    """The folder with one folder a paper: inside an installed package, or next to the package in a checkout.

    Raises
    ------
    InputError
        If there is neither.
    """
    package = Path(__file__).resolve().parent
    shipped = package / "_experiments"
    if shipped.is_dir():
        return shipped
    # A folder of that name beside an installed package belongs to somebody else.
    if (package.parent / "pyproject.toml").is_file() and (package.parent / "experiments").is_dir():
        return package.parent / "experiments"
    raise InputError("experiments", str(shipped), "the papers' tables are missing: install theory-lab again")


def papers(folder: Path | None = None) -> list[str]:
    """Ids of the papers that can be audited."""
    return sorted(file.parent.name for file in (folder or experiments_dir()).glob(f"*/{_FILE}"))


def load(paper: str, folder: Path | None = None) -> Paper:
    """Read and validate a paper's tables and statements.

    Parameters
    ----------
    paper : str
        Its id, as :func:`papers` lists them.
    folder : Path, optional
        Another experiments folder.

    Raises
    ------
    InputError
        If there is no such paper, or its file has an unknown key, a wrong type or a reference to nothing; the
        message names file, entry and key.
    """
    known = papers(folder)
    if paper not in known:
        near = difflib.get_close_matches(paper, known, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise InputError("paper", paper, f"{hint}known: {', '.join(known) or 'none'}")
    path = (folder or experiments_dir()) / paper / _FILE
    file = f"experiments/{paper}/{_FILE}"
    top = Entry(read_toml(path), file, "top level")
    about = Entry(top.take("paper"), file, "paper")
    title = about.text("title")
    about.done()
    tables: dict[str, Table] = {}
    for number, values in enumerate(_list(top, "table"), 1):
        table = read_table(values, file, number)
        if table.id in tables:
            raise InputError(f"{file}, table '{table.id}', key 'id'", table.id, "every table has an id of its own")
        tables[table.id] = table
    statements: dict[str, Statement] = {}
    for number, values in enumerate(_list(top, "statement"), 1):
        statement = _read_statement(values, file, number, tables)
        if statement.id in statements:
            where = f"{file}, statement '{statement.id}', key 'id'"
            raise InputError(where, statement.id, "every statement has an id of its own")
        statements[statement.id] = statement
    top.done()
    return Paper(paper, title, tables, tuple(statements.values()))


def _list(top: Entry, key: str) -> list[Any]:
    value = top.take(key)
    if not isinstance(value, list) or not value:
        raise top.error(key, value, f"at least one [[{key}]] is needed")
    return value


def _read_statement(values: Any, file: str, number: int, tables: Tables) -> Statement:
    entry = Entry(values, file, f"statement {number}")
    name = entry.text("id")
    entry.where = f"statement '{name}'"
    inside = entry.inside("check")
    check = KINDS[inside.choice("kind", tuple(KINDS))](inside, tables)
    inside.done()
    note = entry.text("note") if entry.has("note") else ""
    statement = Statement(name, entry.text("text"), entry.text("source"), note, check)
    entry.done()
    return statement


class _Claims:
    """Rows of claims: those given, or those of a small run of each claim, once."""

    def __init__(self, rows: pd.DataFrame | None) -> None:
        for column in ("claim", "verdict"):
            if rows is not None and column not in rows:
                raise InputError("rows", list(rows.columns), f"the column '{column}' of theory_lab.check is needed")
        self._rows = rows
        self._runs: dict[str, pd.DataFrame] = {}

    def __call__(self, claim: str, settings: dict[str, Any]) -> pd.DataFrame:
        if self._rows is not None:
            found = self._rows[self._rows["claim"] == claim]
            if found.empty:
                raise CannotMeasure(f"rows of the claim {claim}")
            return found
        key = f"{claim} {sorted(settings.items())}"
        if key not in self._runs:
            import theory_lab

            try:
                self._runs[key] = theory_lab.check(claim, workers=1, **settings)
            except InputError as error:
                if error.field != "claim":
                    raise
                # Either there is no such claim, or it needs a package that is not installed.
                missing = error.allowed.removeprefix("it needs ")
                unknown = f"the claim {claim}, which this version of the toolkit does not have"
                raise CannotMeasure(unknown if missing == error.allowed else missing) from None
        return self._runs[key]


def audit(paper: str, rows: pd.DataFrame | None = None, *, folder: Path | None = None) -> pd.DataFrame:
    """Hold a paper's tables against its statements and against measurements: the same as ``theory-lab audit``.

    Parameters
    ----------
    paper : str
        ``tda``, ``asentmax`` or ``eta``.
    rows : pandas.DataFrame, optional
        Results of :func:`theory_lab.check`; the columns ``claim`` and ``verdict`` decide statements that a claim
        stands for. (Rows whose ``assumptions`` are not met are left out.) Without it, a small check of each such
        claim is run.
    folder : Path, optional
        Another experiments folder.

    Returns
    -------
    pandas.DataFrame
        One row a statement, with the columns :data:`COLUMNS`; the index holds the statements' ids.

        AGREES, CONTRADICTS
            The check holds, or fails, for every number that rounds to what is printed.
        UNDECIDED
            It depends on digits that are not printed, or on a simulation that is not conclusive.
        NOT MEASURED
            The toolkit cannot measure it here; the note says what it needs.

    Raises
    ------
    InputError
        If the paper is unknown, its data is not valid, or ``rows`` lacks a column.
    """
    loaded = load(paper, folder)
    claims = _Claims(rows)
    found = []
    for statement in loaded.statements:
        outcome = statement.check.run(claims)
        note = "; ".join(part for part in (outcome.note, statement.note) if part)
        found.append((paper, statement.text, statement.source, statement.check.text, outcome.printed,
                      outcome.computed, outcome.verdict, note))  # fmt: skip
    index = pd.Index([statement.id for statement in loaded.statements], name="id")
    return pd.DataFrame(found, columns=list(COLUMNS), index=index)
