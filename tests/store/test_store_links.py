"""A results folder of another's, with links in it."""

from __future__ import annotations

from pathlib import Path

import pytest

import theory_lab
from theory_lab.errors import InputError
from theory_lab.store.archive import Archive


@pytest.mark.parametrize("name", ["timings.csv", ".lock", "manifest.json", "cells", "packs", "cells/x.parquet"])
def test_a_link_in_a_results_folder_is_refused_and_what_it_leads_to_is_left_alone(tmp_path: Path, name: str) -> None:
    words = {"noise": "gaussian", "length": [2], "trials": 8, "workers": 1}
    out, victim = tmp_path / "r", tmp_path / "victim"
    theory_lab.check("tda-4.3", out=out, **words)
    victim.write_text("precious\n", encoding="utf-8")
    place = out / name
    if place.is_dir():
        place.rename(tmp_path / "moved")
        target = tmp_path / "moved"
    else:
        place.unlink(missing_ok=True)
        target = victim
    place.symlink_to(target)
    with pytest.raises(InputError, match="is a link or a device"):
        theory_lab.check("tda-4.3", out=out, resume=True, **words)
    with pytest.raises(InputError, match="is a link or a device"):
        Archive(out)
    assert victim.read_text(encoding="utf-8") == "precious\n"


def test_a_link_to_a_results_folder_is_one(tmp_path: Path) -> None:
    words = {"noise": "gaussian", "length": [2], "trials": 8, "workers": 1}
    theory_lab.check("tda-4.3", out=tmp_path / "r", **words)
    (tmp_path / "link").symlink_to(tmp_path / "r")
    assert len(theory_lab.check("tda-4.3", out=tmp_path / "link", resume=True, **words)) == 1
