"""The kinds of checks that a statement may ask for. Each is read from data, validated, and can come out either way.

A check is read when its file is loaded, so that every reference is known to resolve before anything is computed.
Truth has three values: True, False, and None where the printed digits cannot tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from itertools import pairwise
from typing import Any, NamedTuple

from theory_lab.audit_data import Entry, Named, Quantity, Table, agree, at_most, exact, less, parse_printed, pick

AGREES, CONTRADICTS, UNDECIDED, NOT_MEASURED = "AGREES", "CONTRADICTS", "UNDECIDED", "NOT MEASURED"

Truth = bool | None
Tables = Mapping[str, Table]

#: Comparisons of two quantities; "==" is agreement within the printed precision.
COMPARISONS: dict[str, Callable[[Quantity, Quantity], Truth]] = {
    "<": less,
    "<=": at_most,
    ">": lambda a, b: less(b, a),
    ">=": lambda a, b: at_most(b, a),
    "==": agree,
    "!=": lambda a, b: not agree(a, b),
}


class Outcome(NamedTuple):
    """What a check found, as the audit's columns."""

    verdict: str
    printed: str
    computed: str
    note: str = ""


@dataclass(frozen=True)
class Check:
    """A validated check: what it asks, in words, and the function that answers. Its argument runs claims by id."""

    text: str
    run: Callable[[Any], Outcome]


class Expression(NamedTuple):
    """A quantity, how it is made, and the printed cells that it is made of."""

    value: Quantity
    formula: str
    cells: tuple[str, ...] = ()


def every_true(truths: Iterable[Truth]) -> Truth:
    """Conjunction in three values."""
    found = list(truths)
    return False if False in found else None if None in found else True


def settle(truth: Truth, printed: str, computed: str, note: str = "") -> Outcome:
    """The outcome of a comparison of printed numbers."""
    if truth is None:
        note = "; ".join(part for part in ("the printed digits cannot decide it", note) if part)
        return Outcome(UNDECIDED, printed, computed, note)
    return Outcome(AGREES if truth else CONTRADICTS, printed, computed, note)


# --- References: cells, vectors of cells, and arithmetic on them ---


def read_table_name(entry: Entry, tables: Tables, key: str = "table") -> Table:
    """The table that a key names."""
    return tables[pick(entry.text(key), list(tables), entry, key)]


def read_names(entry: Entry, key: str, known: Mapping[str, Any]) -> list[str]:
    """Row or column names under a key, all by default."""
    if not entry.has(key):
        return list(known)
    return [pick(name, list(known), entry, key) for name in entry.texts(key)]


def read_vector(entry: Entry, tables: Tables) -> list[Named]:
    """Cells of one column (``column``, perhaps ``rows``) or of one row (``row``, perhaps ``columns``)."""
    table = read_table_name(entry, tables)
    if entry.has("column") == entry.has("row"):
        raise entry.error("column", "neither or both of column and row", "exactly one is needed")
    if entry.has("column"):
        column = pick(entry.text("column"), list(table.units), entry, "column")
        return [Named(row, table.cells[row][column]) for row in read_names(entry, "rows", table.cells)]
    row = pick(entry.text("row"), list(table.cells), entry, "row")
    return [Named(column, table.cells[row][column]) for column in read_names(entry, "columns", table.units)]


def numbers_of(named: list[Named], entry: Entry) -> tuple[dict[str, Quantity], str]:
    """The printed numbers of a vector, and a note about cells that are not printed."""
    for name, value in named:
        if isinstance(value, str):
            raise entry.error("", f"{name}: {value}", "a column of numbers is needed, this one holds words")
    found = {name: value for name, value in named if isinstance(value, Quantity)}
    left_out = [name for name, value in named if value is None]
    return found, f"not printed, so left out: {', '.join(left_out)}" if left_out else ""


def cells_text(where: str, found: Mapping[str, Quantity]) -> str:
    """Several cells of one row or column in one line."""
    return f"{where}: {', '.join(value.text for value in found.values())}"


def _cell(entry: Entry, tables: Tables) -> Expression:
    table = read_table_name(entry, tables)
    row = pick(entry.text("row"), list(table.cells), entry, "row")
    column = pick(entry.text("column"), list(table.units), entry, "column")
    entry.done()
    # A column called 'value' has no name of its own: the row says what it is.
    value, name = table.cells[row][column], row if column == "value" else f"{row}, {column}"
    if not isinstance(value, Quantity):
        raise entry.error("row", name, "a cell with a printed number is needed")
    return Expression(value, f"[{name}]", (f"{name}: {value.text}{table.unit_text(column)}",))


def _sum(terms: list[Quantity]) -> Quantity:
    return Quantity(Fraction(sum(t.low for t in terms)), Fraction(sum(t.high for t in terms)))


def _difference(a: Quantity, b: Quantity) -> Quantity:
    return Quantity(a.low - b.high, a.high - b.low)


def _product(a: Quantity, b: Quantity) -> Quantity:
    ends = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
    return Quantity(min(ends), max(ends))


def _ratio(a: Quantity, b: Quantity) -> Quantity:
    return _product(a, Quantity(1 / b.high, 1 / b.low))


_FOLDS: dict[str, Callable[[list[Quantity]], Quantity]] = {
    "sum": _sum,
    "mean": lambda terms: _product(_sum(terms), exact(Fraction(1, len(terms)))),
    "product": lambda terms: reduce(_product, terms),
    "min": lambda terms: Quantity(min(t.low for t in terms), min(t.high for t in terms)),
    "max": lambda terms: Quantity(max(t.low for t in terms), max(t.high for t in terms)),
}
_PAIRS = {"difference": (_difference, "-"), "ratio": (_ratio, "/")}


def read_expression(entry: Entry, key: str, tables: Tables) -> Expression:
    """A number (exact), a string (as printed), a cell, or one operation on a list of expressions."""
    value = entry.take(key)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number = exact(value)
        return Expression(number, number.text)
    if isinstance(value, str):
        printed = parse_printed(value)
        if printed is None:
            raise entry.error(key, value, "a number is needed")
        return Expression(printed, value)
    inner = entry.inside(key)
    if inner.has("table"):
        return _cell(inner, tables)
    operations = [name for name in (*_FOLDS, *_PAIRS) if inner.has(name)]
    if len(operations) != 1:
        raise entry.error(key, value, f"a number, a cell or one of {', '.join((*_FOLDS, *_PAIRS))} is needed")
    return _operation(inner, operations[0], tables)


def _operation(entry: Entry, name: str, tables: Tables) -> Expression:
    items = entry.take(name)
    entry.done()
    if isinstance(items, dict):
        vector = entry.inside(name)
        found, missing = numbers_of(read_vector(vector, tables), vector)
        vector.done()
        if missing or not found:
            raise entry.error(name, missing, "every cell of a sum, mean or extreme must be printed")
        title = read_table_name(vector, tables).title
        where = vector.text("column" if vector.has("column") else "row")
        values = list(found.values())
        formulas = list(found)
        cells: tuple[str, ...] = (cells_text(where, found),)
        formula = f"{name} of {where} in {title}"
    elif isinstance(items, list) and items:
        numbered = Entry({str(i): item for i, item in enumerate(items)}, entry.file, entry.where, entry._name(name))
        terms = [read_expression(numbered, str(i), tables) for i in range(len(items))]
        values, formulas = [term.value for term in terms], [term.formula for term in terms]
        cells = tuple(cell for term in terms for cell in term.cells)
        formula = f"({' x '.join(formulas)})" if name == "product" else f"{name}({', '.join(formulas)})"
    else:
        raise entry.error(name, items, "a list of expressions, or the table and column of several cells, is needed")
    if name in _FOLDS:
        return Expression(_FOLDS[name](values), formula, cells)
    function, sign = _PAIRS[name]
    if len(values) != 2:
        raise entry.error(name, items, "exactly two expressions are needed")
    if name == "ratio" and values[1].low <= 0 <= values[1].high:
        raise entry.error(name, items, "the divisor may be 0")
    return Expression(function(*values), f"({formulas[0]} {sign} {formulas[1]})", cells)


# --- The kinds ---


def _extremum(entry: Entry, tables: Tables) -> Check:
    """A row (or column) has the lowest or highest value, or the one of that rank, in every column (or row) named."""
    table = read_table_name(entry, tables)
    which = entry.choice("which", ("min", "max"))
    rank = entry.whole("rank", 1, 1)
    columns = read_names(entry, "columns", table.units)
    rows = read_names(entry, "rows", table.cells)
    winner = pick(entry.text("is"), rows, entry, "is")
    word = {"min": "lowest", "max": "highest"}[which]
    place = {1: word, 2: f"second {word}", 3: f"third {word}"}.get(rank, f"{rank}th {word}")
    better = less if which == "min" else (lambda a, b: less(b, a))
    cases = []
    for column in columns:
        found, missing = numbers_of([Named(row, table.cells[row][column]) for row in rows], entry)
        if winner not in found or len(found) < 2:
            raise entry.error("is", winner, f"its {column} and another row's must be printed")
        cases.append((column, found, missing))

    def run(_: Any) -> Outcome:
        truths: list[Truth] = []
        printed, computed, notes = [], [], []
        for column, found, missing in cases:
            beaten = [better(value, found[winner]) for name, value in found.items() if name != winner]
            sure, open_ = beaten.count(True), beaten.count(None)
            if not sure <= rank - 1 <= sure + open_:
                truths.append(False)
            else:
                truths.append(None if open_ else True)
            order = sorted(found, key=lambda name: found[name].middle, reverse=which == "max")
            there = order[min(rank, len(order)) - 1]
            unit = table.unit_text(column)
            if truths[-1] is not True or len(cases) == 1:
                printed.append(f"{winner}, {column}: {found[winner].text}{unit}")
                computed.append(f"{place}: {there}, {found[there].text}{unit}")
            if missing and missing not in notes:
                notes.append(missing)
        if not printed:
            printed = [f"{winner}: " + ", ".join(found[winner].text for _, found, _ in cases)]
            computed = [f"{place} in all {len(cases)}"]
        return settle(every_true(truths), "; ".join(printed), "; ".join(computed), "; ".join(notes))

    shown = ", ".join(columns) if len(columns) < 4 else f"{len(columns)} columns"
    return Check(f"{winner} has the {place} {shown} in {table.title}", run)


def _monotone(entry: Entry, tables: Tables) -> Check:
    """The cells of a column (or row) rise or fall in the order of the table."""
    direction = entry.choice("direction", ("increasing", "decreasing"))
    named = read_vector(entry, tables)
    found, missing = numbers_of(named, entry)
    if len(found) < 2:
        raise entry.error("table", len(found), "at least two printed numbers are needed")
    follows = less if direction == "increasing" else (lambda a, b: less(b, a))
    what = entry.take("column") if entry.has("column") else entry.take("row")

    def run(_: Any) -> Outcome:
        steps = {f"{a} to {b}": follows(found[a], found[b]) for a, b in pairwise(found)}
        broken = [name for name, truth in steps.items() if truth is not True]
        printed = ", ".join(value.text for value in found.values())
        computed = f"not {direction} from {', '.join(broken)}" if broken else f"{direction} at all {len(steps)} steps"
        return settle(every_true(steps.values()), printed, computed, missing)

    return Check(f"{what} is {direction} from {next(iter(found))} to {list(found)[-1]}", run)


def _compare(entry: Entry, tables: Tables) -> Check:
    """One expression against another."""
    left, right = (read_expression(entry, key, tables) for key in ("left", "right"))
    sign = entry.choice("op", tuple(COMPARISONS))
    printed = "; ".join(dict.fromkeys(left.cells + right.cells))
    if not printed:
        raise entry.error("left", left.formula, "at least one side must refer to a table")

    def run(_: Any) -> Outcome:
        truth = COMPARISONS[sign](left.value, right.value)
        return settle(truth, printed, f"{left.value.show()} against {right.value.show()}")

    return Check(f"{left.formula} {sign} {right.formula}", run)


def _every(entry: Entry, tables: Tables) -> Check:
    """Every cell of a column (or row) satisfies a comparison with one number."""
    sign = entry.choice("op", tuple(COMPARISONS))
    right = read_expression(entry, "value", tables)
    found, missing = numbers_of(read_vector(entry, tables), entry)
    if not found:
        raise entry.error("table", "no printed numbers", "at least one is needed")
    what = entry.take("column") if entry.has("column") else entry.take("row")

    def run(_: Any) -> Outcome:
        truths = {name: COMPARISONS[sign](value, right.value) for name, value in found.items()}
        printed = ", ".join(f"{name}: {value.text}" for name, value in found.items())
        failing = [f"{name} ({found[name].text})" for name, truth in truths.items() if truth is False]
        open_ = [f"{name} ({found[name].text})" for name, truth in truths.items() if truth is None]
        parts = [f"fails at {', '.join(failing)}"] * bool(failing) + [f"open at {', '.join(open_)}"] * bool(open_)
        return settle(every_true(truths.values()), printed, "; ".join(parts) or f"holds at all {len(truths)}", missing)

    return Check(f"{what} {sign} {right.formula} at {', '.join(found)}", run)


def _wins(entry: Entry, tables: Tables) -> Check:
    """In how many columns one row beats another."""
    table = read_table_name(entry, tables)
    row, over = (pick(entry.text(key), list(table.cells), entry, key) for key in ("row", "over"))
    which = entry.choice("which", ("min", "max"))
    sign = entry.choice("op", tuple(COMPARISONS))
    right = read_expression(entry, "value", tables)
    columns = read_names(entry, "columns", table.units)
    ours, note = numbers_of([Named(c, table.cells[row][c]) for c in columns], entry)
    theirs, other_note = numbers_of([Named(c, table.cells[over][c]) for c in columns], entry)
    shared = [c for c in columns if c in ours and c in theirs]
    if not shared:
        raise entry.error("columns", columns, "at least one column where both rows are printed is needed")
    better = less if which == "min" else (lambda a, b: less(b, a))

    def run(_: Any) -> Outcome:
        truths = {c: better(ours[c], theirs[c]) for c in shared}
        sure = [c for c, truth in truths.items() if truth]
        open_ = sum(truth is None for truth in truths.values())
        count = Quantity(Fraction(len(sure)), Fraction(len(sure) + open_))
        printed = ", ".join(f"{c}: {ours[c].text} and {theirs[c].text}" for c in shared)
        computed = f"{row} is better in {len(sure)} of {len(shared)}" + (f": {', '.join(sure)}" if sure else "")
        notes = "; ".join(dict.fromkeys(filter(None, (note, other_note))))
        return settle(COMPARISONS[sign](count, right.value), printed, computed, notes)

    return Check(f"columns where {row} beats {over}: {sign} {right.formula} of {len(shared)}", run)


def _same(entry: Entry, tables: Tables) -> Check:
    """Two tables print the same numbers wherever they share a row and a column."""
    first, second = (read_table_name(entry, tables, key) for key in ("table", "other"))
    pairs = []
    for row, cells in first.cells.items():
        for column, cell in cells.items():
            twin = second.cells.get(row, {}).get(column)
            if isinstance(cell, Quantity) and isinstance(twin, Quantity):
                pairs.append((f"{row}, {column}", cell, twin))
    if not pairs:
        raise entry.error("other", second.id, f"a table that shares printed cells with '{first.id}' is needed")

    def run(_: Any) -> Outcome:
        differ = [f"{name}: {a.text} and {b.text}" for name, a, b in pairs if not agree(a, b)]
        computed = f"{len(differ)} differ" if differ else f"all {len(pairs)} shared cells agree"
        return settle(not differ, "; ".join(differ) or f"{len(pairs)} cells printed twice", computed)

    return Check(f"{first.title} and {second.title} print the same", run)


#: Kinds that need the printed tables alone; ``measured`` is in theory_lab.audit_measure.
PRINTED_KINDS: dict[str, Callable[[Entry, Tables], Check]] = {
    "extremum": _extremum,
    "monotone": _monotone,
    "compare": _compare,
    "every": _every,
    "wins": _wins,
    "same": _same,
}
