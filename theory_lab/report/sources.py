"""What may be reported on: results folders and row files, recognized by what they hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theory_lab import __version__
from theory_lab.errors import InputError, StoreError
from theory_lab.noise.empirical import check_parquet_size
from theory_lab.outside import foreign, parse_json, read_json, undefused
from theory_lab.parquet_pages import check_pages

if TYPE_CHECKING:
    import pandas as pd

#: More rows than this make a page that no browser opens with pleasure.
MOST_ROWS = 20_000
#: Columns of a table that are looked at.
MOST_COLUMNS = 2_000

_SUFFIXES = (".parquet", ".csv", ".json")
_ABOUT = b"theory_lab"


@dataclass(frozen=True)
class Source:
    """Rows and what is known about them.

    Attributes
    ----------
    name : str
        The path as it was given.
    kind : str
        What the rows are, a key of :data:`KINDS`; or ``experiments``, which have files and no rows.
    rows : DataFrame
        The rows.
    about : dict
        Settings and versions that were stored with them; empty if none were.
    """

    name: str
    kind: str
    rows: pd.DataFrame
    about: dict[str, Any] = field(default_factory=dict)


def _check_numbers() -> tuple[str, ...]:
    return (
        "length", "head_dim", "kappa", "beta", "sigma", "rho", "key_rho", "lambda", "trials", "estimate",
        "standard_error", "relative_error", "ci_low", "ci_high", "ci_error", "bound", "exact", "slack", "seconds",
    )  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """Columns by which a kind of rows is known; ``numbers`` of them are numeric, and ``more`` if the rest are too;
    ``wholes`` are whole numbers."""

    what: str
    columns: tuple[str, ...]
    numbers: tuple[str, ...]
    more: bool = False
    wholes: tuple[str, ...] = ()


def _kinds() -> dict[str, Kind]:
    numbers = _check_numbers()
    check = (
        "claim",
        "noise",
        *numbers,
        "estimator",
        "method",
        "verdict",
        "assumptions",
        "note",
        "seed",
        "device",
        "version",
    )
    audit = ("paper", "statement", "source", "check", "printed", "computed", "verdict", "note")
    phase = ("law", "mechanism", "scale", "length", "normalized_entropy", "standard_error", "dead_rows", "rows", "seed")
    probe = ("model", "weights", "text", "window", "start", "length", "layer", "head", "dead_head", "rows", "visible")
    return {
        "check": Kind("rows of theory-lab check", check, numbers),
        "audit": Kind("rows of theory-lab audit", audit, ()),
        "probe": Kind(
            "rows of theory-lab probe",
            probe,
            probe[3:],
            more=True,
            wholes=("window", "start", "length", "layer", "head", "rows", "visible"),
        ),
        "phase": Kind("rows of theory-lab phase", phase, phase[2:], wholes=("length", "rows", "seed")),
    }


KINDS: dict[str, Kind] = _kinds()


def read(name: str) -> Source:
    """Read a results folder or a row file.

    Raises
    ------
    InputError
        If it is missing, damaged, empty or holds something else; the message names the column at fault.
    StoreError
        If another version wrote it.
    """
    path = Path(name)
    if path.is_dir():
        return _read_folder(name, path)
    if not path.exists():
        raise InputError("results", name, "no such file or folder")
    if path.suffix.lower() not in _SUFFIXES:
        raise InputError("results", name, f"a results folder or a file ending in {', '.join(_SUFFIXES)} is allowed")
    return _known(name, *_read_file(name, path))


def _read_folder(name: str, path: Path) -> Source:
    manifest = path / "manifest.json"
    if not manifest.exists():
        return _read_experiments(name, path)
    about = _json(name, manifest)
    if not isinstance(about, dict):
        raise InputError("results", name, "its manifest.json is damaged")
    _same_version(name, about.get("theory_lab"))
    rows = path / "rows.parquet"
    if not rows.exists():
        raise InputError("results", name, "it has no rows.parquet yet: finish its run first")
    frame, stored = _read_file(name, rows)
    return _known(name, frame, {**about, **stored})


def _read_experiments(name: str, path: Path) -> Source:
    import pandas as pd

    from theory_lab.report.experiments import find_experiments

    found = find_experiments(path)
    if not found:
        raise InputError(
            "results", name, "a folder that theory-lab check, probe or reproduce wrote with --out DIR is allowed"
        )
    for entry in found:
        _same_version(name, entry["version"])
    return Source(name, "experiments", pd.DataFrame(), {"experiments": found})


def _json(name: str, path: Path) -> Any:
    try:
        return read_json(path)
    except (OSError, ValueError):
        raise InputError("results", name, f"{path.name} is damaged") from None


def _read_file(name: str, path: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    import pandas as pd

    about: dict[str, Any] = {}
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _read_parquet(name, path)
    if suffix == ".csv":
        try:
            # As text: a noise that is called NA, or 1e3, is a name; numbers are parsed where numbers belong.
            with open(path, "rb") as file:
                head = file.readline(1 << 20)
            if head.count(b",") >= MOST_COLUMNS:
                raise InputError("results", name, f"at most {MOST_COLUMNS:,} columns make a report")
            frame = pd.read_csv(path, dtype=str, keep_default_na=False, nrows=MOST_ROWS + 1, engine="c")
        except InputError:
            raise
        except (OSError, ValueError, pd.errors.ParserError, pd.errors.EmptyDataError):
            raise InputError("results", name, "it cannot be read as CSV with a header") from None
        return frame.map(undefused).rename(columns=undefused), about
    found = _json(name, path)
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise InputError("results", name, "an array of rows, as theory-lab check --format json prints it, is allowed")
    with foreign(lambda why: InputError("results", name, f"its rows are damaged ({why})")):
        return pd.DataFrame(found), about


def _read_parquet(name: str, path: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    from theory_lab.store import require_pyarrow

    require_pyarrow()
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        check_pages(path)
        with pq.ParquetFile(path) as file:
            # A few bytes can stand for billions of rows: the footer is asked first.
            check_parquet_size(file.metadata, f"results: {name}", MOST_ROWS)
            if file.metadata.num_columns > MOST_COLUMNS:
                raise InputError("results", name, f"at most {MOST_COLUMNS:,} columns make a report")
            table = file.read()
        # What pandas once noted about its index and types is left aside: it can name types that run code.
        frame = table.to_pandas(ignore_metadata=True)
        about = parse_json((table.schema.metadata or {}).get(_ABOUT, b"{}"))
    except InputError:
        raise
    except (OSError, pa.ArrowException, ValueError, TypeError, KeyError, NotImplementedError):
        raise InputError("results", name, f"{path.name} is damaged, or no Parquet file") from None
    return frame, about if isinstance(about, dict) else {}


def _known(name: str, frame: pd.DataFrame, about: dict[str, Any]) -> Source:
    # pandas and pyarrow have an error of their own for each text and number that cannot stand in a column.
    with foreign(lambda why: InputError("results", name, f"its rows are damaged ({why})")):
        return _recognize(name, frame, about)


def _recognize(name: str, frame: pd.DataFrame, about: dict[str, Any]) -> Source:
    columns = {str(column) for column in frame.columns}
    missing = {kind: [c for c in known.columns if c not in columns] for kind, known in KINDS.items()}
    kind = min(missing, key=lambda k: len(missing[k]) / len(KINDS[k].columns))
    if missing[kind]:
        share = len(missing[kind]) / len(KINDS[kind].columns)
        absent = f"{KINDS[kind].what} need the column '{missing[kind][0]}'"
        raise InputError(
            "results", name, absent if share < 0.5 else f"{', '.join(k.what for k in KINDS.values())} are allowed"
        )
    if frame.empty:
        raise InputError("results", name, "it holds no rows")
    if len(frame) > MOST_ROWS:
        raise InputError("results", f"{name} with {len(frame):,} rows", f"at most {MOST_ROWS:,} rows make a report")
    frame = frame.loc[:, ~frame.columns.duplicated()].copy()
    known = KINDS[kind]
    for column in frame.columns if known.more else known.columns:
        numeric = column in known.numbers or column not in known.columns
        frame[column] = _numbers(name, frame[column]) if numeric else _texts(frame[column])
    for column in known.wholes:
        bad = frame[column][~(frame[column].abs().lt(2.0**53) & (frame[column] % 1 == 0))]
        if len(bad):
            raise InputError(f"results: {name}, column {column}", str(bad.iloc[0]), "a whole number is allowed")
    CHECKS.get(kind, lambda name, frame: None)(name, frame)
    return Source(name, kind, frame.reset_index(drop=True), about)


def _numbers(name: str, column: pd.Series[Any]) -> pd.Series[Any]:
    import pandas as pd

    given = column
    if column.dtype == object or str(column.dtype) == "str":
        given = column.replace({"": None, "True": 1.0, "False": 0.0})
    parsed = pd.to_numeric(given, errors="coerce")
    bad = given[parsed.isna() & given.notna()]
    if len(bad):
        raise InputError(f"results: {name}, column {column.name}", str(bad.iloc[0]), "a number is allowed")
    return parsed.astype(float)


def _texts(column: pd.Series[Any]) -> pd.Series[Any]:
    return column.map(lambda value: "" if value is None or value != value else str(value)).astype(object)


def _check_verdicts(name: str, frame: pd.DataFrame) -> None:
    from theory_lab.estimation.verdicts import Verdict

    allowed = [str(v) for v in Verdict]
    bad = frame.verdict[~frame.verdict.isin(allowed)]
    if len(bad):
        raise InputError(f"results: {name}, column verdict", bad.iloc[0], f"{', '.join(allowed)} are allowed")
    for column in ("estimate", "bound"):
        if frame[column].isna().any():
            raise InputError(f"results: {name}, column {column}", "(empty)", "a number is needed in every row")
    for version in frame.version.unique():
        _same_version(name, version)


def _same_version(name: str, version: object) -> None:
    if version != __version__:
        raise StoreError(
            f"results: {name}; written by version {str(version)[:40]}, this is {__version__}; "
            "use that version to report on it"
        )


CHECKS: dict[str, Callable[[str, pd.DataFrame], None]] = {"check": _check_verdicts}
