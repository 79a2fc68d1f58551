"""The manifest: which format, draws and toolkit a results folder is of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from theory_lab import __version__
from theory_lab.errors import InputError, StoreError
from theory_lab.outside import parse_json
from theory_lab.store.cells import DAMAGE, FORMAT_VERSION, DamagedError, decode, read_findings
from theory_lab.store.files import write_atomically
from theory_lab.store.packs import Pack, pack_names
from theory_lab.store.versions import provenance
from theory_lab.streams import STREAM_VERSION

NAME = "manifest.json"
#: What made the folder; other commands name themselves in theirs.
KIND = "check"
_FIELDS = ("format", "stream", "theory_lab")
#: What may lie in a results folder whose manifest was lost, or not written yet.
_OURS = {"cells", "packs", ".lock", ".compact.lock", NAME, "rows.parquet", "timings.csv", "set-aside"}


#: How the temporary names of what is written into the folder itself begin.
TEMPORARY = (f".{NAME}-", ".rows.parquet-", ".timings.csv-")


def text() -> bytes:
    """The manifest of a folder that this version writes."""
    return (json.dumps({"format": FORMAT_VERSION, **provenance()}, indent=2, sort_keys=True) + "\n").encode()


def raise_format(path: Path) -> None:
    """Let the manifest say the present format, and leave its versions; the caller holds the lock."""
    found = parse_json((path / NAME).read_bytes()) if read(path) else None
    if found and found["format"] < FORMAT_VERSION:
        content = (json.dumps({**found, "format": FORMAT_VERSION}, indent=2, sort_keys=True) + "\n").encode()
        write_atomically(path / NAME, lambda file: file.write(content))


def check_folder(path: Path) -> None:
    """InputError if a folder without a readable manifest holds something that is not ours."""
    if path.exists() and not path.is_dir():
        raise InputError("out", str(path), "a folder is allowed, and this is a file")
    if path.exists() and any(p.name not in _OURS and not p.name.startswith(TEMPORARY) for p in path.iterdir()):
        raise InputError("out", str(path), "a new, empty or results folder is allowed")


def read(path: Path) -> dict[str, Any] | None:
    """The manifest's versions; None if it is missing or damaged.

    Raises
    ------
    InputError
        If there is a manifest, and it is that of something else.
    """
    try:
        raw = (path / NAME).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"out: {path}; its {NAME} cannot be read ({error.strerror})") from None
    try:
        found = parse_json(raw)
    except DAMAGE:
        return None
    if isinstance(found, dict) and found.get("kind", KIND) != KIND:
        raise InputError("out", str(path), f"a folder of theory-lab {KIND} is allowed, and this is a {found['kind']}'s")
    if isinstance(found, dict) and all(
        isinstance(found.get(n), kind) for n, kind in zip(_FIELDS, (int, int, str), strict=True)
    ):
        return {name: found[name] for name in _FIELDS}
    if (path / "cells").is_dir():
        return None
    raise InputError("out", str(path), "a results folder is allowed, and its manifest.json is that of something else")


def recover(path: Path) -> dict[str, Any] | None:
    """What the manifest of a folder must have said, by its cells; None if there are none.

    Raises
    ------
    StoreError
        If its cells are of several versions.
    """
    found: dict[str, Any] | None = None
    for about in _said(path):
        version = {
            "format": about.get("format", 1),
            "stream": about.get("stream"),
            "theory_lab": about.get("theory_lab"),
        }
        if found is None or found["format"] < version["format"]:
            found = {**version, "stream": found["stream"], "theory_lab": found["theory_lab"]} if found else version
        if any(found[name] != version[name] for name in ("stream", "theory_lab")):
            raise StoreError(
                f"out: {path}; its manifest.json is damaged, and its cells are of several versions; name another folder"
            )
    return found


def _said(path: Path) -> Iterator[dict[str, Any]]:
    """What readable cells say about themselves: all of the loose ones, and one of each pack."""
    for name in sorted(pack_names(path / "packs")):
        pack = Pack(path / "packs", name)
        for row in range(min(1, len(pack.names))):
            try:
                yield pack.about(row) if pack.is_cell(row) else pack.findings(row)
            except (DamagedError, *DAMAGE):
                continue
    cells = path / "cells"
    for file in sorted(cells.iterdir()) if cells.is_dir() else []:
        try:
            if file.suffix == ".parquet":
                yield decode(file.read_bytes())[1]
            elif file.suffix == ".json":
                yield read_findings(file)
        except (DamagedError, *DAMAGE):
            continue


def refuse_other_versions(path: Path, found: dict[str, Any]) -> None:
    """StoreError unless this version continues what ``found`` describes; older formats it does."""
    same = found["stream"] == STREAM_VERSION and found["theory_lab"] == __version__
    if same and 1 <= found["format"] <= FORMAT_VERSION:
        return
    can = found["stream"] == STREAM_VERSION and 1 <= found["format"] <= FORMAT_VERSION
    advice = (
        f"bring it here with: theory-lab results migrate {path}" if can else "name another folder or use that version"
    )
    raise StoreError(
        f"out: {path}; written by version {found['theory_lab']} (format {found['format']}), this is "
        f"{__version__} (format {FORMAT_VERSION}); {advice}"
    )
