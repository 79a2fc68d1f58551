"""Targets that read files: scores, rows, experiments, plans, stores, corpora, texts."""

from __future__ import annotations

import functools
import gzip
import io
import json
import random
import re
from pathlib import Path
from typing import Any

import fuzz_inputs as make
import numpy as np
from fuzz_harness import Place, Target, put

from theory_lab import __version__

ROOT = Path(__file__).resolve().parents[2]


# scores


@functools.cache
def _npy() -> tuple[bytes, ...]:
    found = []
    for array in (
        np.linspace(-1, 1, 50),
        np.arange(12).reshape(3, 4),
        np.ones(5, "f4") * [1, 2, 3, 4, 5],
        np.array(["a", "b"]),
    ):
        buffer = io.BytesIO()
        np.save(buffer, array)
        found.append(buffer.getvalue())
    buffer = io.BytesIO()
    np.savez(buffer, scores=np.linspace(-1, 1, 9))
    found.append(buffer.getvalue())
    buffer = io.BytesIO()
    np.save(buffer, np.array([{"a": 1}, 2], dtype=object), allow_pickle=True)
    found.append(buffer.getvalue())
    return tuple(found)


def _make_npy(rng: random.Random) -> bytes:
    data = rng.choice(_npy())
    if rng.random() < 0.4:  # another header: the words are evaluated by its reader
        shape = rng.choice(("(50,)", "(9223372036854775807,)", "(-1,)", "(0,)", "()", "(1e9,)", "(2**40,)", "(4294967296, 4294967296)",
                            "(True,)", "((1,),)", "None", "(10**12,)", "(1,)*40", "(300000000,)"))  # fmt: skip
        kind = rng.choice(("<f8", "<f4", "|O", "<U5", "|V8", "<c16", "<M8[s]", "|b1", ">f8", "f" * 50, "<f16", "<i8", "<U999999999",
                           "[('a', '<f8')]", "__import__('os').system('id')"))  # fmt: skip
        text = f"{{'descr': '{kind}', 'fortran_order': {rng.choice(('False', 'True', '1', 'x'))}, 'shape': {shape}, }}"
        body = text.encode() + b" " * rng.randrange(9) + b"\n"
        data = b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body + data[128:]
    return make.damaged(rng, data) if rng.random() < 0.8 else data


def _make_csv(rng: random.Random) -> bytes:
    lines = [
        ",".join(str(rng.choice((rng.gauss(0, 1), make.number(rng)))) for _ in range(rng.choice((1, 1, 1, 2))))
        for _ in range(6)
    ]
    if rng.random() < 0.4:
        lines.insert(0, rng.choice(("score", "score,other", "a,score", "x", "score,score")))
    if rng.random() < 0.3:
        lines.insert(rng.randrange(len(lines)), make.word(rng))
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    if rng.random() < 0.01:
        data = b"," * rng.choice((1000, 200_000)) + data
    return make.damaged(rng, data) if rng.random() < 0.6 else data


@functools.cache
def _parquet() -> tuple[bytes, ...]:
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq

    frames: list[Any] = [
        pa.Table.from_pandas(pd.DataFrame({"score": np.linspace(-1, 1, 30)})),
        pa.table({"score": [1.0, None, 3.0], "other": ["a", "b", "c"]}),
        pa.table({"score": pa.array(np.zeros(200_000))}),
        pa.table({"score": pa.array([[1.0], [2.0]])}),
        pa.table({"score": pa.array(["x"] * 5).dictionary_encode()}),
    ]
    found = []
    for table in frames:
        for compression in ("none", "zstd"):
            buffer = io.BytesIO()
            pq.write_table(table, buffer, compression=compression)
            found.append(buffer.getvalue())
    return tuple(found)


def _make_parquet(rng: random.Random) -> bytes:
    data = rng.choice(_parquet())
    if rng.random() < 0.5 and len(data) > 200:  # the footer is where a file says what it holds
        size = int.from_bytes(data[-8:-4], "little")
        split = len(data) - 8 - size
        return data[:split] + make.damaged(rng, data[split:])
    return make.damaged(rng, data)


def _scores(suffix: str) -> Any:
    def run(data: bytes, place: Place) -> None:
        from theory_lab.noise.empirical import read_scores

        path = place.given / f"scores.{suffix}"
        path.write_bytes(data)
        found = read_scores(path)
        assert found.ndim == 1
        assert np.isfinite(found).all()

    return run


# experiments, plans, presets


@functools.cache
def _tomls(pattern: str, but: str = "tables.toml") -> tuple[dict[str, Any], ...]:
    import tomllib

    paths = [p for p in sorted((ROOT / "experiments").glob(pattern)) if p.name != but]
    texts = [tomllib.loads(p.read_text(encoding="utf-8")) for p in paths]
    return tuple(t for t in texts if len(json.dumps(t)) < 6000)


def _make_toml(pattern: str, but: str = "tables.toml") -> Any:
    def build(rng: random.Random) -> bytes:
        tree = rng.choice(_tomls(pattern, but))
        text = make.as_toml(make.altered(rng, tree)).encode("utf-8", "surrogatepass")
        if rng.random() < 0.03:
            text = make.crowded(rng, text)
        return make.damaged(rng, text) if rng.random() < 0.25 else text

    return build


def _experiment(data: bytes, place: Place) -> None:
    from theory_lab.reproduce.spec import OWN, load

    path = place.given / "mine.toml"
    path.write_bytes(data)
    made = load(path, OWN, "mine.toml")
    made.at("full")
    made.at("quick")


def _plan(data: bytes, place: Place) -> None:
    from theory_lab.campaigns import read_plan

    path = place.given / "plan.toml"
    path.write_bytes(data)
    campaign = read_plan(str(path))
    for run in campaign.runs:
        inside = (place.out / run.folder).resolve()
        assert inside.is_relative_to(place.out.resolve()), inside
        assert inside != place.out.resolve()


def _preset(data: bytes, place: Place) -> None:
    from theory_lab.training.presets import get_preset

    path = place.given / "train-x.toml"
    path.write_bytes(data)
    get_preset(str(path))


_RESULT = {
    "name": "TDA", "seed": 0, "layers": [{"step": 1, "layer": 0, "zeros": 0.5}],
    "train": {"val_loss": 2.5, "tokens_per_second": 1e4, "device": "cpu", "settings": {"length": 64}},
    "measured": {
        "loss": {"64": [2.0, 2.5]}, "heads": [{"layer": 0, "length": 64, "sparsity": 0.9, "g_sink_ratio_1": 0.1, "max_abs": 3.0}],
        "inhibition": {"tokens": ["a", " b", "=x"], "map": [[1, 2, 3], [1, 2, 3], [1, 2, 3]]},
        "tasks": [{"length": 64, "accuracy": 0.5}], "learned": [{"layer": 0, "tau": [0.1, 0.2]}],
    },
}  # fmt: skip
_PLAN = {
    "title": "t", "data": "task", "seeds": [0, 1], "train": {"task": "recall", "steps": 2, "length": 16},
    "runs": {"TDA": {"attention": "tda"}, "=cmd": {"attention": "softmax"}},
    "figures": [
        {"into": "tda/table-2", "columns": {"loss": "loss", "=z": "zeros", "acc": "accuracy@64"}},
        {"into": "tda/figure-sinks", "x": "length", "value": "g_sink_ratio_1"},
        {"into": "tda/map", "value": "inhibition"}, {"into": "tda/learned", "value": "tau"},
        {"into": "tda/steps", "x": "step", "series": {"a": "zeros"}, "runs": ["TDA"], "note": "n"},
    ],
}  # fmt: skip


def _make_campaign(rng: random.Random) -> dict[str, bytes]:
    plan = make.altered(rng, _PLAN) if rng.random() < 0.5 else _PLAN
    result = make.altered(rng, _RESULT) if rng.random() < 0.6 else dict(_RESULT)
    text = make.as_toml(plan if isinstance(plan, dict) else {}).encode("utf-8", "surrogatepass")
    files = {"plan.toml": text}
    for name, folder in (("TDA", "tda"), ("=cmd", "cmd")):
        for seed in (0, 1):
            own = {**result, "name": name, "seed": seed} if isinstance(result, dict) and rng.random() < 0.98 else result
            files[f"r/{folder}/seed-{seed}/result.json"] = (
                make.as_json(rng, own) if rng.random() < 0.2 else json.dumps(own).encode()
            )
    return files


def _campaign(files: dict[str, bytes], place: Place) -> None:
    from theory_lab.campaigns import gather, read_plan

    put(files, place.given)
    for path in gather(read_plan(str(place.given / "plan.toml")), place.given / "r", place.out):
        _no_formulas(path)


def _no_formulas(path: Path) -> None:
    import csv

    with open(path, encoding="utf-8", newline="") as file:
        lines = file.readlines()
    begin = next((number for number, line in enumerate(lines) if line[0] != "#"), len(lines))
    cells = [cell for row in csv.reader(lines[begin:]) for cell in row]  # and cells are what stands above them:
    cells += [cell.strip(' "') for line in lines[:begin] for cell in re.split("[,;]", line)]
    for cell in cells:
        assert not is_formula(cell), cell


def is_formula(cell: str) -> bool:
    """Whether a spreadsheet would take a cell for a formula."""
    if not cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")) or cell in ("-", "+"):
        return False
    try:
        float(cell)
    except ValueError:
        return True
    return False


# rows and results folders, for reports


@functools.cache
def _rows() -> tuple[tuple[dict[str, Any], ...], ...]:
    check = {
        "claim": "tda-4.3", "noise": "gaussian", "length": 64, "head_dim": 64, "kappa": 1.0, "beta": 1.0, "sigma": 1.0, "rho": None,
        "key_rho": 0.0, "lambda": None, "trials": 1000, "estimate": 0.1, "standard_error": 0.01, "relative_error": 0.1,
        "ci_low": 0.08, "ci_high": 0.12, "ci_error": 1e-4, "bound": 1.0, "exact": 0.1, "slack": 0.1, "seconds": 0.1,
        "estimator": "tail", "method": "normal", "verdict": "HOLDS", "assumptions": "met", "note": "", "seed": 0, "device": "cpu",
        "version": __version__, "subject": "", "n": 64,
    }  # fmt: skip
    audit = {"paper": "tda", "statement": "s", "source": "Table 1", "check": "difference", "printed": "1", "computed": "2",
             "verdict": "AGREES", "note": ""}  # fmt: skip
    phase = {"law": "gaussian", "mechanism": "tda", "scale": 1.0, "length": 64, "normalized_entropy": 0.5, "standard_error": 0.1,
             "dead_rows": 0.0, "rows": 64, "seed": 0}  # fmt: skip
    probe = {"model": "m", "weights": "model", "text": "t", "window": 0, "start": 0, "length": 64, "layer": 0, "head": 0, "dead_head": 0,
             "rows": 64, "visible": 2080, "sparsity": 0.1, "g_sink_ratio_1": 0.3, "sink_weight_1": 0.3, "normalized_entropy": 0.4}  # fmt: skip
    return tuple(
        tuple({**row, **({"length": row["length"] * (i + 1)} if "length" in row else {})} for i in range(3))
        for row in (check, audit, phase, probe)
    )


def _make_rows(rng: random.Random) -> dict[str, bytes]:
    rows = [dict(row) for row in rng.choice(_rows())]
    if rng.random() < 0.9:
        rows = make.altered(rng, rows)
    if rng.random() < 0.4 and rows and all(isinstance(row, dict) for row in rows):  # text from outside, that would act
        for row in rows:
            for name, inner in row.items():
                if isinstance(inner, str) and name not in ("verdict", "version") and rng.random() < 0.5:
                    row[name] = make.word(rng)
    form = rng.choice(("json", "json", "csv", "parquet"))
    if form == "json":
        return {"rows.json": make.as_json(rng, rows)}
    import pandas as pd

    try:
        frame = pd.DataFrame(rows)
        if form == "csv":
            data = frame.to_csv(index=False).encode("utf-8", "surrogatepass")
        else:
            buffer = io.BytesIO()
            frame.astype(str if rng.random() < 0.3 else frame.dtypes).to_parquet(buffer)
            data = buffer.getvalue()
    except Exception:  # not every value can stand in every table
        return {"rows.json": make.as_json(rng, rows)}
    return {f"rows.{form}": make.damaged(rng, data) if rng.random() < 0.2 else data}


def _report(files: dict[str, Any], place: Place) -> None:
    from theory_lab.report.html import to_html
    from theory_lab.report.latex import to_latex
    from theory_lab.report.markdown import to_markdown
    from theory_lab.report.write import build

    put(files, place.given)
    name = next(iter(files))
    sections = build([str(place.given / name if "/" not in name else place.given)], pictures=False)
    page = to_html("A report", sections)
    check_page(page)
    to_markdown("A report", sections)
    to_latex("A report", sections)


def check_page(page: str) -> None:
    """A page must hold its own script alone, no handlers, and no addresses but its own."""
    from lxml import html

    tree = html.document_fromstring(page)
    assert len(tree.xpath("//script")) == 1, "a second script"
    assert len(tree.xpath("//style")) == 1, "a second style sheet"
    assert not tree.xpath("//iframe|//object|//embed|//form|//base|//svg|//link"), (
        "an element that does not belong there"
    )
    for element in tree.iter():
        for key, text in element.attrib.items():
            assert not key.lower().startswith("on"), f"a handler: {key}"
            if key in ("href", "src", "action", "formaction"):
                assert text.startswith(("#", "data:image/png;base64,")), f"an address: {text[:80]}"


_SIDECAR = {
    "experiment": "own.mine", "files": ["mine.csv", "mine.png"], "title": "t", "source": "s", "caption": "c", "seed": 0, "size": "full",
    "device": "cpu", "version": __version__, "hash": "0" * 64, "drawing": "0" * 64,
}  # fmt: skip
_TABLE = "row,column,unit,paper,ours,value,low,high,difference,difference_value,difference_low,difference_high\n" \
         "a,b,%,1,2,3,2,4,1,1,0,2\n"  # fmt: skip


@functools.cache
def _png() -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(buffer, "PNG")
    return buffer.getvalue()


def _bomb() -> bytes:
    """A picture of a few bytes that says it is 65,535 by 65,535 pixels."""
    import struct
    import zlib

    head = struct.pack(">IIBBBBB", 65535, 65535, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + head
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk)) + _png()[33:]


def _make_drawn(rng: random.Random) -> dict[str, Any]:
    about = make.altered(rng, _SIDECAR) if rng.random() < 0.7 else dict(_SIDECAR)
    table = _TABLE.encode() if rng.random() < 0.5 else make.damaged(rng, _TABLE.encode())
    picture = rng.choice(
        (_png(), make.damaged(rng, _png()), _bomb(), b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n")
    )
    if isinstance(about, dict) and rng.random() < 0.5:
        about["files"] = ["mine.csv"]
    files: dict[str, Any] = {"own/mine.json": make.as_json(rng, about), "own/mine.csv": table, "own/mine.png": picture}
    if rng.random() < 0.05:
        files["own/mine.csv"] = ["->", "/etc/passwd"]
    return files


def _drawn(files: dict[str, Any], place: Place) -> None:
    from theory_lab.report.html import to_html
    from theory_lab.report.write import build
    from theory_lab.reproduce.gallery import gallery
    from theory_lab.reproduce.spec import experiments
    from theory_lab.reproduce.state import NEVER, State

    put(files, place.given)
    known = _known(experiments)
    text = gallery(known, {name: State(NEVER) for name in known}, place.given)
    assert "<script" not in text.replace("\\<", ""), "markup in the gallery"
    page = to_html("A report", build([str(place.given)]))
    check_page(page)
    assert "root:x:0" not in page, "a file from elsewhere is shown"


_kept: list[Any] = []


def _known(experiments: Any) -> Any:
    if not _kept:
        _kept.append(dict(list(experiments().items())[:2]))
    return _kept[0]


# text and corpora


@functools.cache
def _documents() -> tuple[tuple[str, bytes], ...]:
    html = b"<!doctype html><html><head><title>t</title></head><body><main><h1>A</h1><pre> x\n y</pre><p>b &amp; c<br>d</main></body></html>"
    man = b'.TH X 1\n.SH NAME\nx \\- y\n.IP "a b" 4\n.B bold "text"\n.nf\n code\n.fi\n.de XX\n.foo\n..\n\\fBb\\fR \\(aq \\[u2014]\n'
    pod = b"=head1 NAME\n\nC<< a >> B<b I<c>> L<text|x> E<lt> E<233>\n\n  code\n\n=begin x\n\ny\n\n=end x\n\n=cut\n\ncode\n"
    lines = b'{"text": "one"}\n{"text": "two", "n": 1}\n'
    return (
        ("a.html", html), ("a.1", man), ("a.pod", pod), ("a.jsonl", lines), ("a.txt", b"plain\n\n\n\ntext\r\n"),
        ("a.txt.gz", gzip.compress(b"x" * 1000)), ("a.jsonl.gz", gzip.compress(lines)), ("a.html.gz", gzip.compress(html)),
    )  # fmt: skip


def _make_document(rng: random.Random) -> dict[str, bytes]:
    name, data = rng.choice(_documents())
    if rng.random() < 0.02 and not name.endswith(".gz"):
        piece = rng.choice(
            (
                b" ",
                b"\t",
                b"A<< ",
                b"A<",
                b"\\f[",
                b'"',
                b'"" ',
                b"<div>",
                b"<pre> ",
                b"B<<<",
                b"\n ",
                b"\\(",
                b"[[",
                b".\n",
            )
        )
        data = (b"=head1 x\n\n" if name.endswith(".pod") else b"") + piece * rng.choice((1000, 30_000)) + data
    if name.endswith(".gz"):
        inner = make.damaged(rng, gzip.decompress(data))
        data = gzip.compress(inner) if rng.random() < 0.7 else data
        data = make.damaged(rng, data) if rng.random() < 0.5 else data
    else:
        data = make.damaged(rng, data)
    return {name: data}


def _document(files: dict[str, bytes], place: Place) -> None:
    from theory_lab.corpus.documents import read_path
    from theory_lab.probes.texts import decode

    put(files, place.given)
    for name, data in files.items():
        _, documents = read_path(str(place.given / name))
        for document in documents:
            assert "\0" not in document.text
        decode(name, data)


_MANIFEST = {
    "format": 1, "name": "mine", "tokenizer": {"vocab_size": 300, "sha256": "0" * 64},
    "splits": {split: {"tokens": 100, "documents": 2, "characters": 400, "sha256": "0" * 64} for split in ("train", "validation")},
    "sources": [{"kind": "file", "name": "a", "version": "", "license": "x", "documents": 2, "kept_documents": 2, "tokens": 200}],
}  # fmt: skip


def _make_corpus(rng: random.Random) -> dict[str, Any]:
    manifest = make.altered(rng, _MANIFEST) if rng.random() < 0.8 else _MANIFEST
    tokens = np.arange(100, dtype="<u2").tobytes()
    starts = io.BytesIO()
    np.save(starts, np.array([0, 50]))
    files: dict[str, Any] = {"manifest.json": make.as_json(rng, manifest)}
    for split in ("train", "validation"):
        files[f"{split}.bin"] = make.damaged(rng, tokens) if rng.random() < 0.1 else tokens
        files[f"{split}.documents.npy"] = (
            make.damaged(rng, starts.getvalue()) if rng.random() < 0.3 else starts.getvalue()
        )
    if rng.random() < 0.02:
        files["train.bin"] = ["->", "/dev/zero"]
    return files


def _corpus(files: dict[str, Any], place: Place) -> None:
    import contextlib

    from theory_lab.commands.corpus import _print
    from theory_lab.corpus import Corpus
    from theory_lab.outside import visible

    put(files, place.given)
    found = Corpus.open(place.given)
    found.documents("train")
    found.source("train").describe()
    found.source("train").batch(0, 2, 8)
    found.windows("validation", 8, 2)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        _print(found)
    for line in said.getvalue().splitlines():
        assert visible(line) == line, line


TARGETS = (
    Target("scores-npy", _make_npy, _scores("npy"), 110),
    Target("scores-csv", _make_csv, _scores("csv"), 15),
    Target("scores-parquet", _make_parquet, _scores("parquet"), 35),
    Target("experiment-toml", _make_toml("*/*.toml"), _experiment, 14),
    Target("plan-toml", _make_toml("ours/campaigns/*.toml"), _plan, 2.5, heavy=True),
    Target("preset-toml", _make_toml("*/train-*.toml"), _preset, 6),
    Target("campaign-results", _make_campaign, _campaign, 2, heavy=True),
    Target("report-rows", _make_rows, _report, 0.6, heavy=True),
    Target("report-folder", _make_drawn, _drawn, 0.6, heavy=True),
    Target("corpus-document", _make_document, _document, 40),
    Target("corpus-folder", _make_corpus, _corpus, 4),
)
