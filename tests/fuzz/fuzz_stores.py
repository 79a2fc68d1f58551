"""Targets of what a run keeps: results folders, probe folders; and pictures with words from outside."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import fuzz_inputs as make
from fuzz_harness import Place, Target, put

from theory_lab import __version__


@functools.cache
def _stores() -> tuple[dict[str, bytes], ...]:
    """Folders of a small run: cells in files of their own, and packed."""
    import theory_lab

    made = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "r"
        theory_lab.check(["tda-4.3", "asentmax-theta"], noise="gaussian", length=[2, 64], trials=64, out=out, workers=1)
        made.append(_files(out))
        with contextlib.suppress(Exception):
            from theory_lab.store import compact

            compact(out)
            made.append(_files(out))
    return tuple(made)


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name != ".lock"
    }


def _make_store(rng: random.Random) -> dict[str, Any]:
    files: dict[str, Any] = dict(rng.choice(_stores()))
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(list(files))
        data = files[name]
        if not isinstance(data, bytes):
            continue
        if name.endswith(".json"):
            with contextlib.suppress(ValueError, RecursionError):
                files[name] = make.as_json(rng, make.altered(rng, json.loads(data)))
        elif name.endswith(".parquet") and len(data) > 200 and rng.random() < 0.6:
            split = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
            files[name] = data[: max(split, 0)] + make.damaged(rng, data[max(split, 0) :])
        else:
            files[name] = make.damaged(rng, data)
        if rng.random() < 0.04:
            files[name] = ["->", rng.choice(("/etc/passwd", "/dev/zero", "../../../evil", "."))]
        if rng.random() < 0.05:
            del files[name]
    return files


def _store(files: dict[str, Any], place: Place) -> None:
    import theory_lab
    from theory_lab.store import Store

    put(files, place.out / "r")
    Store(place.out / "r", resume=True)
    rows = theory_lab.check(
        ["tda-4.3"], noise="gaussian", length=[2, 64], trials=64, out=place.out / "r", resume=True, workers=1
    )
    assert len(rows) == 2
    assert (rows.trials == 64).all()


def _results(files: dict[str, Any], place: Place) -> None:
    from theory_lab.cli import command

    put({f"given/{name}": content for name, content in files.items()}, place.root)
    where = str(place.given)
    for words in (["ls", where], ["ls", where, "--cells"], ["verify", where], ["show", where, "tda-4.3"], ["export", where, "--to", "x.csv"],
                  ["export", where, "--to", "y.json", "--what", "cells"], ["export", where, "--to", "z.csv", "--what", "blocks"]):  # fmt: skip
        out = io.TextIOWrapper(io.BytesIO(), "utf-8")
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
                command.main(["results", *words], prog_name="theory-lab", standalone_mode=False)
        except Exception as error:
            from fuzz_harness import GOOD

            if not isinstance(error, GOOD):
                raise
        out.flush()
        assert b"\x1b" not in out.buffer.getvalue()  # type: ignore[attr-defined]


# a probe's folder


@functools.cache
def _probe_files() -> dict[str, bytes]:
    import pandas as pd

    buffer = io.BytesIO()
    pd.DataFrame({"layer": [0], "head": [0], "sparsity": [0.5]}).to_parquet(buffer)
    about = {"kind": "probe", "format": 1, "theory_lab": __version__}
    return {"manifest.json": json.dumps(about).encode(), "cells/0123.parquet": buffer.getvalue()}


def _make_probe(rng: random.Random) -> dict[str, bytes]:
    files = dict(_probe_files())
    if rng.random() < 0.5:
        files["manifest.json"] = make.as_json(rng, make.altered(rng, json.loads(files["manifest.json"])))
    else:
        files["cells/0123.parquet"] = make.damaged(rng, files["cells/0123.parquet"])
    return files


def _probe(files: dict[str, bytes], place: Place) -> None:
    from theory_lab.probes.keep import ProbeFolder

    put(files, place.out / "p")
    folder = ProbeFolder(place.out / "p")
    folder.load("0123")
    folder.finished()


# pictures


def _make_picture(rng: random.Random) -> dict[str, Any]:
    return {"names": [make.word(rng)[:200] for _ in range(3)], "suffix": rng.choice((".svg", ".png"))}


def _picture(value: dict[str, Any], place: Place) -> None:
    import pandas as pd
    from fuzz_files import _rows
    from lxml import etree

    from theory_lab.figures.check_plot import plot_check
    from theory_lab.outside import visible

    rows = [dict(row) for row in _rows()[0]]
    for row, name in zip(rows, value["names"], strict=True):
        row |= {"noise": visible(name) or "x", "note": visible(name), "length": 64}
    path = place.out / f"picture{value['suffix']}"
    plot_check(pd.DataFrame(rows), str(path))
    if value["suffix"] == ".svg":
        tree = etree.parse(path)
        for element in tree.iter():
            tag = etree.QName(element).localname if isinstance(element.tag, str) else ""
            assert tag not in ("script", "foreignObject", "image", "a", "iframe"), tag
            for key, text in element.attrib.items():
                assert not etree.QName(key).localname.lower().startswith("on"), key
                assert etree.QName(key).localname != "href" or text.startswith("#"), text


TARGETS = (
    Target("store", _make_store, _store, 1),
    Target("store-results", _make_store, _results, 0.2, heavy=True),
    Target("probe-folder", _make_probe, _probe, 5, heavy=True),
    Target("pictures", _make_picture, _picture, 0.05, heavy=True),
)
