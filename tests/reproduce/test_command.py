"""``theory-lab reproduce`` as people call it."""

from __future__ import annotations

import re
from pathlib import Path

from reproduce_samples import SMALL

from theory_lab.reproduce import experiments
from theory_lab.reproduce.gallery import write_gallery
from theory_lab.reproduce.run import reproduce


def test_command(cli, tmp_path: Path) -> None:
    env = {"THEORY_LAB_CACHE": str(tmp_path / "cache"), "COLUMNS": "120"}
    (tmp_path / "mine.toml").write_text(SMALL)
    listed = cli("reproduce", env=env)
    assert listed.returncode == 0, listed.stderr
    for name in experiments():
        assert name in listed.stdout
    assert "never drawn" in listed.stdout
    assert "needs data" in listed.stdout

    drawn = cli("reproduce", "mine.toml", "tda.table-5", "--quick", "--out", "pictures", "--workers", 1, env=env)
    assert drawn.returncode == 0, drawn.stderr
    assert "pictures/own/mine.png" in drawn.stdout
    assert (tmp_path / "pictures" / "README.md").exists()
    again = cli("reproduce", "mine.toml", "--quick", "--out", "pictures", env=env)
    assert "fresh" in again.stderr

    lacking = cli("reproduce", "tda.table-3", env=env)
    assert lacking.returncode == 2
    assert "tda.table-3: needs data" in lacking.stderr
    assert lacking.stderr.count("error") == 1


def test_bad_usage(cli, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(SMALL.replace("trials", "trails"))
    for words, text in (
        (("reproduce", "tda.figure-sink"), "did you mean 'tda.figure-sinks'"),
        (("reproduce", "bad.toml"), "bad.toml, line 10, key 'settings.trails': unknown key; did you mean 'trials'"),
    ):
        found = cli(*words)
        assert found.returncode == 2
        assert found.stdout == ""
        assert text in found.stderr
        assert "Traceback" not in found.stderr
        assert found.stderr.count("\n") == 1
    # What only shows once it is computed is bad input as well.
    (tmp_path / "claim.toml").write_text(SMALL.replace("tda-4.3", "tda-9.9"))
    found = cli("reproduce", "claim.toml", "--quiet", env={"THEORY_LAB_CACHE": str(tmp_path / "cache")})
    assert found.returncode == 2
    assert "claim.toml, line 7, key 'settings.claims': tda-9.9" in found.stderr


def test_gallery(make, tmp_path: Path) -> None:
    """Every link leads somewhere; what is not drawn is named; a page that is no gallery is left alone."""
    chosen = [e for e in experiments().values() if e.id in ("tda.table-5", "ours.kernel-speed")]
    assert [outcome.failure for outcome in reproduce(chosen, tmp_path)] == ["", ""]
    write_gallery(tmp_path, "results")
    page = (tmp_path / "README.md").read_text()
    links = [link for link in re.findall(r"\]\(([^)]+)\)", page) if not link.startswith("..")]
    assert len(links) >= 6
    for link in links:
        assert (tmp_path / link).is_file(), link
    assert "`tda.table-3`" in page
    assert chosen[0].caption in page
    other = tmp_path / "other"
    other.mkdir()
    (other / "README.md").write_text("# Mine\n")
    assert "left as it is" in write_gallery(other, "results")
    assert (other / "README.md").read_text() == "# Mine\n"
    (other / "README.md").unlink()
    write_gallery(other, "results\udc80")  # a name that is no text, as the command line may bring it
    assert "results\\udc80" in (other / "README.md").read_text(encoding="utf-8")


def test_gallery_shows_a_users_own(make, tmp_path: Path) -> None:
    """Their words are shown as they are written, and are neither markup nor links."""
    hostile = "<script>alert(1)</script> ![x](http://example.org/x.png)"
    reproduce([make(SMALL.replace('"Small"', repr(hostile)))], tmp_path, quick=True, workers=1)
    (tmp_path / "own" / "damaged.json").write_text('{"title": 3')
    (tmp_path / "own" / "elsewhere.json").write_text(
        '{"title": "T", "caption": "C", "source": "S", "size": "full", "files": ["../../secret.png"]}'
    )
    write_gallery(tmp_path, "results")
    page = (tmp_path / "README.md").read_text()
    assert "## Own experiments" in page
    assert "(own/small.png)" in page
    assert "`theory-lab reproduce small.toml`" in page
    assert "\\<script\\>alert(1)" in page
    assert not re.search(r"(?<!\\)<script|(?<!\\)!\[x", page)
    assert "secret" not in page
    assert "docs/reproduce.md" not in page  # not beside this folder
