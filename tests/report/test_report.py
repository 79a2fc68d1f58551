"""Reports: what they say, that nothing in them acts, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest
from markdown_it import MarkdownIt
from report_inputs import HOSTILE, Page

from theory_lab.errors import InputError, StoreError
from theory_lab.report import build, write_report
from theory_lab.report.check import command_line
from theory_lab.report.html import to_html
from theory_lab.report.latex import escape as latex_escape
from theory_lab.report.latex import to_latex
from theory_lab.report.markdown import escape as markdown_escape
from theory_lab.report.markdown import to_markdown
from theory_lab.report.parts import Section, visible
from theory_lab.settings import Budget, Settings
from theory_lab.store import rows_to_parquet


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return to_html("A report", build([str(folder)]))


def test_says_what_the_rows_say(page: str, rows: pd.DataFrame) -> None:
    parsed = Page(page)
    cells = parsed.cells
    assert cells.count("VIOLATED") == (rows.verdict == "VIOLATED").sum() + 1  # and asentmax-theta at a glance
    values = {a.get("data-v") for a in parsed.named("td")}
    assert {repr(float(v)) for v in rows.estimate} <= values
    assert "2 of 3 claims hold" in page
    assert "violated: asentmax-theta" in page
    controls = int((rows.assumptions != "met").sum())
    assert f"{controls} of {len(rows)} rows are controls" in page
    assert "theory-lab check tda-4.3 tda-4.6 --noise gaussian" in html.unescape(page)
    for name in ("seed", "device", "numpy", "scipy", "random streams"):
        assert f"<dt>{name}</dt>" in page


def test_every_claim_has_a_picture_and_words(page: str, rows: pd.DataFrame) -> None:
    images = Page(page).named("img")
    assert len(images) == rows.claim.nunique()
    for image in images:
        content = base64.b64decode(str(image["src"]).removeprefix("data:image/png;base64,"))
        assert content.startswith(b"\x89PNG")
        assert len(content) > 5000
    assert "The claim holds for gaussian, spherical. Outside its assumptions it is violated for laplace." in page
    assert "ends at the worst that it found" in page


def test_policy_admits_its_own_script_and_style_alone(page: str) -> None:
    parsed = Page(page)
    policy = next(str(m["content"]) for m in parsed.named("meta") if m.get("http-equiv") == "Content-Security-Policy")
    for name in ("script", "style"):
        assert len(parsed.named(name)) == 1
        digest = base64.b64encode(hashlib.sha256(parsed.blocks[name].encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_needs_nothing_else(page: str) -> None:
    for tag, attributes in Page(page).elements:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form")
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            assert name != "style", tag  # the policy would refuse it
            if name in ("src", "href", "action", "srcset"):
                assert str(value).startswith(("data:image/png;base64,", "#")), (tag, name)


def test_hostile_texts_stay_texts(hostile: Path) -> None:
    page = to_html("</title><script>0</script>", build([str(hostile)]))
    parsed = Page(page)
    assert len(parsed.named("script")) == len(parsed.named("style")) == 1
    assert not parsed.named("h1")[1:]
    assert not any(name.startswith("on") for _, attributes in parsed.elements for name in attributes)
    shown = "\n".join(parsed.cells)
    for text in HOSTILE:
        assert visible(text.replace("\ud800", "")) in shown
    assert "[U+202E]" in shown
    assert "\u202e" not in page
    assert "\x00" not in page
    assert "49" not in [cell for cell in parsed.cells if "7 * 7" in cell]


def test_visible_hides_nothing_and_keeps_words() -> None:
    assert visible("naïve κ ≤ 1, 中") == "naïve κ ≤ 1, 中"
    assert visible("a\nb") == "a⏎b"
    assert visible("\ud800\u200b\x1b[31m") == "[U+D800][U+200B][U+001B][31m"


@pytest.mark.parametrize("text", HOSTILE)
def test_markdown_shows_the_text_itself(text: str) -> None:
    md = MarkdownIt("commonmark").enable("table")
    rendered = md.render(f"| a | b |\n|---|---|\n| {markdown_escape(text)} | x |\n")
    cells = Page(rendered).cells
    assert [html.unescape(c) for c in cells] == [visible(text).strip(), "x"]


@pytest.mark.parametrize("text", [*HOSTILE, "- item", "12. item", "---", "===", "+ plus", "1) one", "-0.5", "# head"])
def test_markdown_paragraphs_are_paragraphs(text: str) -> None:
    section = Section(text, lead=(text,), settings=((text, text),))
    rendered = MarkdownIt("commonmark").render(to_markdown(text, [section]))
    parsed = Page(rendered)
    assert [name for name, _ in parsed.elements] == ["h1", "h2", "p", "h3", "ul", "li"]
    assert html.unescape(rendered).count(visible(text).strip()) == 5


def test_markdown_tables_are_tables(folder: Path, rows: pd.DataFrame) -> None:
    text = to_markdown("T", build([str(folder)], pictures=False))
    rendered = MarkdownIt("commonmark").enable("table").render(text)
    assert len(Page(rendered).named("tr")) == 2 + len(rows) + rows.claim.nunique()
    assert rendered.count("<table>") == 2


def test_latex_escapes_everything_that_acts() -> None:
    for text in (*HOSTILE, "".join(map(chr, range(32, 0x250)))):
        out = latex_escape(text)
        bare = re.sub(r"\\(text\w+|allowbreak|[{}$&#_%])(\{\})?", "", out)
        bare = re.sub(r"\$[^$]*\$|\{.\}|\{\}|\\textt{U\+[0-9A-F]+}", "", bare)
        assert not set("\\$&#_%~^<>|\"`'") & set(re.sub(r"\{U\+[0-9A-F]+\}", "", bare)), text
        braces = re.sub(r"\\[{}]", "", out)
        assert braces.count("{") == braces.count("}")


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
def test_latex_compiles(folder: Path, hostile: Path, tmp_path: Path) -> None:
    text = to_latex(HOSTILE[5], build([str(folder), str(hostile)], pictures=False))
    (tmp_path / "tables.tex").write_text(text)
    ran = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", "tables.tex"],
        cwd=tmp_path,
        capture_output=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout.decode(errors="replace")[-2000:]
    assert (tmp_path / "tables.pdf").stat().st_size > 10_000


@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(claims=("tda-4.3",), noise=("gaussian", "student-t:3"), length=(2, 2**40), kappa=(0.5, 1.0)),
        Settings(rho=(0.0, 0.0752), lam=(0.25,), key_rho=(0.1,), head_dim=(16, 64), trials=10**9, seed=2**63 - 1),
        Settings(estimator="direct", alpha=1e-6, tolerance=0.5, bound_scale=0.05, beta=(0.8,), sigma=(2.0,)),
        Settings(budget=Budget(seconds=30.0)),
        Settings(budget=Budget(trials=1e9)),
    ],
)
def test_command_line_asks_for_the_same(settings: Settings) -> None:
    from theory_lab.cli import _settings, check_command

    words = shlex.split(command_line(json.loads(json.dumps(settings.describe()))))
    assert words[:2] == ["theory-lab", "check"]
    options = check_command.make_context("check", words[2:]).params
    assert _settings(options).describe() == settings.describe()


def test_files_of_rows(rows: pd.DataFrame, tmp_path: Path) -> None:
    from theory_lab.render import to_csv, to_json

    contents = {"csv": to_csv(rows).encode(), "json": to_json(rows).encode(), "parquet": rows_to_parquet(rows)}
    tables = []
    for suffix, content in contents.items():
        path = tmp_path / f"rows.{suffix}"
        path.write_bytes(content)
        (section,) = build([str(path)], pictures=False)
        assert any("not stored" in value for _, value in section.settings)
        assert section.command == ""
        tables.append([[cell.text for cell in row] for row in section.tables[0].rows])
    assert tables[0] == tables[1] == tables[2]


def test_other_kinds(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    cells = pd.read_csv(root / "figures" / "ours" / "phase.csv")
    cells = cells[(cells.law == "gaussian") & cells.mechanism.isin(["softmax", "tra"])]
    cells.to_csv(tmp_path / "phase.csv", index=False)
    (phase,) = build([str(tmp_path / "phase.csv")])
    assert phase.pictures[0].content.startswith(b"\x89PNG")
    assert len(phase.tables[0].rows) == len(cells)
    path = tmp_path / "audit.csv"
    path.write_text("paper,statement,source,check,printed,computed,verdict,note\ntda,s,t,c,1,2,CONTRADICTS,n\n")
    (audit,) = build([str(path)])
    assert audit.tables[0].rows[0][2].text == "CONTRADICTS"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.drop(columns="verdict"), "need the column 'verdict'"),
        (lambda f: f[["claim"]], "rows of theory-lab check, .* are allowed"),
        (lambda f: f.head(0), "holds no rows"),
        (lambda f: f.assign(verdict="MAYBE"), "column verdict: MAYBE; HOLDS"),
        (lambda f: f.assign(estimate="much"), "column estimate: much; a number"),
        (lambda f: f.assign(bound=None), r"column bound: \(empty\)"),
        (lambda f: pd.concat([f] * (20_001 // len(f) + 1)), "at most 20,000 rows"),
    ],
)
def test_wrong_rows(rows: pd.DataFrame, tmp_path: Path, change, message: str) -> None:
    path = tmp_path / "rows.csv"
    change(rows).to_csv(path, index=False)
    with pytest.raises(InputError, match=message):
        build([str(path)], pictures=False)


def test_other_versions(rows: pd.DataFrame, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    rows.assign(version="9.9").to_csv(path, index=False)
    with pytest.raises(StoreError, match=r"written by version 9\.9"):
        build([str(path)])
    old = tmp_path / "old"
    shutil.copytree(folder, old)
    (old / "manifest.json").write_text('{"theory_lab": "0.0.1", "format": 0}')
    with pytest.raises(StoreError, match=r"written by version 0\.0\.1"):
        build([str(old)])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.parquet", b"PAR1 nothing", "damaged, or no Parquet file"),
        ("rows.csv", b"", "cannot be read as CSV"),
        ("rows.csv", b"\xff\xfe\x00", "cannot be read as CSV"),
        ("rows.json", b"[" * 100_000, "damaged"),
        ("rows.json", b'{"a": 1}', "an array of rows"),
        ("rows.txt", b"x", r"ending in \.parquet"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        build([str(tmp_path / name)])


def test_damaged_folders(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        build([str(tmp_path / "absent")])
    with pytest.raises(InputError, match="wrote with --out DIR"):
        build([str(tmp_path)])
    half = tmp_path / "half"
    shutil.copytree(folder, half)
    (half / "rows.parquet").unlink()
    with pytest.raises(InputError, match="finish its run"):
        build([str(half)])
    (half / "manifest.json").write_text("{")
    with pytest.raises(InputError, match="manifest"):
        build([str(half)])


def test_nothing_is_half_written(folder: Path, tmp_path: Path) -> None:
    good, bad = tmp_path / "r.html", tmp_path / "absent" / "r.md"
    with pytest.raises(InputError, match="its folder must exist"):
        write_report([str(folder)], html=str(good), md=str(bad))
    with pytest.raises(InputError, match="no such file"):
        write_report([str(folder), str(tmp_path / "absent")], html=str(good))
    with pytest.raises(InputError, match="a file of its own"):
        write_report([str(folder)], html=str(good), md=str(tmp_path / "." / "r.html"))
    with pytest.raises(InputError, match="nothing to write"):
        write_report([str(folder)])
    assert list(tmp_path.iterdir()) == []


def test_command(cli, folder: Path, tmp_path: Path) -> None:
    ran = cli("report", folder, "--md", "t.md", "--latex", "t.tex", "--title", "Mine")
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "t.md").read_text().startswith("# Mine\n")
    assert (tmp_path / "t.tex").read_text().rstrip().endswith(r"\end{document}")
    ran = cli("report", tmp_path / "absent", "--md", "u.md")
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert "Traceback" not in ran.stderr
    assert not (tmp_path / "u.md").exists()
