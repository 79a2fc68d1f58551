"""Reports of probes and of reproduced experiments."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from report_inputs import HOSTILE

from theory_lab import __version__
from theory_lab.errors import InputError, StoreError
from theory_lab.report import build
from theory_lab.report.html import to_html
from theory_lab.report.latex import to_latex
from theory_lab.report.markdown import to_markdown
from theory_lab.store import rows_to_parquet

LENGTHS, LAYERS, HEADS, TEXTS = (64, 128), 3, 2, ("us-constitution", "paradise-lost", "as-you-like-it")


def probe_rows(texts: tuple[str, ...] = TEXTS, model: str = "a-model") -> pd.DataFrame:
    """Rows as a probe writes them, of made-up values that differ from each other."""
    rng = np.random.default_rng(0)
    places = [(t, n, layer, h) for t in texts for n in LENGTHS for layer in range(LAYERS) for h in range(HEADS)]
    share = rng.uniform(0.1, 0.9, len(places))
    return pd.DataFrame(places, columns=["text", "length", "layer", "head"]).assign(
        model=model, weights="model", window=0, start=0, g_sink_uniform_1=0.05, g_sink_ratio_1=share,
        sink_weight_1=share, top_key=1, top_key_weight=share, sparsity=0.0, normalized_entropy=1 - share, entropy=1.0,
        support=32.5, max_abs=1.0, dead_rows=0.0, dead_head=False, rows=64, visible=2080,
        **{"near_zero_1e-06": share / 9, "near_zero_0.001": share / 2},
    )  # fmt: skip


def write_folder(path: Path, rows: pd.DataFrame, **about: object) -> Path:
    path.mkdir()
    known = {"kind": "probe", "format": 1, "theory_lab": __version__}
    (path / "manifest.json").write_text(json.dumps(known))
    more = {"model": "a-model", "device": "cpu", "dtype": "torch.float32", "fingerprint": "f00", **about}
    (path / "rows.parquet").write_bytes(rows_to_parquet(rows, json.dumps({**known, **more})))
    return path


def test_a_probe_by_length_layer_and_head(tmp_path: Path) -> None:
    rows = probe_rows()
    (section,) = build([str(write_folder(tmp_path / "probe", rows))])
    by_length, (by_layer, by_head) = section.overview[0], section.tables
    assert [len(table.rows) for table in (by_length, by_layer, by_head)] == [2, 2 * LAYERS, 2 * LAYERS * HEADS]
    place = [column.title for column in by_head.columns].index("gSinkRatio(1)")
    means = rows.groupby(["length", "layer", "head"]).g_sink_ratio_1.mean()
    assert [row[place].value for row in by_head.rows] == pytest.approx(list(means))
    place = [column.title for column in by_length.columns].index("gSinkRatio(1)")
    assert [row[place].value for row in by_length.rows] == pytest.approx(
        list(rows.groupby("length").g_sink_ratio_1.mean())
    )
    assert all("(" in row[place].text for row in by_length.rows)  # three texts make an interval
    assert len(section.pictures) == 3
    assert all(picture.content and picture.caption for picture in section.pictures)
    assert section.command.startswith("theory-lab probe a-model --length 64,128")
    assert "--layers" not in section.command
    some = build([str(write_folder(tmp_path / "some", rows[rows.layer != 0]))], pictures=False)[0]
    assert f"--layers {','.join(map(str, range(1, LAYERS)))}" in some.command
    assert ("device", "cpu") in section.settings
    assert ("fingerprint of the model's weights", "f00") in section.settings


def test_a_probe_as_csv_is_the_same(tmp_path: Path) -> None:
    rows = probe_rows()
    rows.to_csv(tmp_path / "rows.csv", index=False)
    (bare,) = build([str(tmp_path / "rows.csv")], pictures=False)
    (full,) = build([str(write_folder(tmp_path / "probe", rows))], pictures=False)
    assert bare.tables == full.tables
    assert any("not stored" in value for _, value in bare.settings)


def test_names_of_models_and_texts_may_be_hostile(tmp_path: Path) -> None:
    texts = tuple(text.replace("\ud800", "").replace("\x00", "") for text in HOSTILE)
    folder = write_folder(tmp_path / "probe", probe_rows(texts, model=HOSTILE[0]))
    sections = build([str(folder)], pictures=False)
    page = to_html("T", sections)
    assert page.count("<script>") == 1
    assert "<img src=x" not in page
    words = re.sub(r"(?ms)^(`{3,})sh$.*?^\1$", "", to_markdown("T", sections))  # a fence shows what it holds
    assert "<b>" not in words.replace("\\<b\\>", "")
    assert "\\input{" not in to_latex("T", sections)
    assert "--text" in sections[0].command  # the names; where those texts lie is not known


def test_two_models_in_one_file_are_refused(tmp_path: Path) -> None:
    rows = pd.concat([probe_rows(), probe_rows(model="another")])
    rows.to_csv(tmp_path / "rows.csv", index=False)
    with pytest.raises(InputError, match="a-model, another; one value"):
        build([str(tmp_path / "rows.csv")])


@pytest.fixture
def drawn(tmp_path: Path) -> Path:
    """A folder as ``theory-lab reproduce`` leaves it: one figure, one table."""
    folder = tmp_path / "drawn" / "tda"
    folder.mkdir(parents=True)
    Image.new("RGB", (40, 30), "navy").save(folder / "figure-survivors.png")
    head = "row,column,unit,paper,ours,value,low,high,difference,difference_value,difference_low,difference_high"
    (folder / "table-5.csv").write_text(f"{head}\n512,speed,x,1.09,,1.2573,1.2276,1.272,,0.1673,0.1376,0.182\n")
    for name, files in (("figure-survivors", ["figure-survivors.png"]), ("table-5", ["table-5.csv"])):
        about = {"experiment": f"tda.{name}", "title": name, "source": "TDA", "seed": 0, "size": "quick",
                 "device": "cpu", "version": __version__, "files": files}  # fmt: skip
        (folder / f"{name}.json").write_text(json.dumps(about))
    return folder.parent


def test_experiments(drawn: Path) -> None:
    (section,) = build([str(drawn)])
    assert [picture.title for picture in section.pictures] == ["figure-survivors"]
    assert "theory-lab reproduce tda.figure-survivors --quick" in section.pictures[0].caption
    (row,) = section.tables[0].rows
    assert [cell.text for cell in row[2:]] == ["1.09 x", "1.257 (1.228 to 1.272) x", "0.1673 (0.1376 to 0.182) x"]


def test_experiments_that_cannot_be_used(drawn: Path) -> None:
    side = drawn / "tda" / "figure-survivors.json"
    about = json.loads(side.read_text())
    side.write_text(json.dumps({**about, "files": ["../../../etc/secret.png", "/etc/secret.png"]}))
    (section,) = build([str(drawn)])
    assert section.pictures == ()  # no path is followed out of the folder
    side.write_text(json.dumps({**about, "version": "9.9"}))
    with pytest.raises(StoreError, match=r"9\.9"):
        build([str(drawn)])
    side.write_text(json.dumps(about))
    (drawn / "tda" / "figure-survivors.png").write_bytes(b"\x89PNG nothing")
    with pytest.raises(InputError, match=r"figure-survivors\.png is missing or damaged"):
        build([str(drawn)])
