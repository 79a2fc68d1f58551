"""What a release holds: every file that the code reads, and its tools tell the truth."""

from __future__ import annotations

import fnmatch
import gzip
import io
import json
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def tracked(*folders: str) -> list[str]:
    done = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return done.stdout.splitlines()


def test_every_data_file_is_in_the_wheel() -> None:
    """Files beside the code match a pattern of package-data; the experiments are reached through a link."""
    patterns = PROJECT["tool"]["setuptools"]["package-data"]
    files = [("theory_lab", name.removeprefix("theory_lab/")) for name in tracked("theory_lab")]
    files += [("theory_lab", f"_{name}") for name in tracked("experiments")]
    kernels = "kernels/theory_kernels"
    files += [("theory_kernels", name.removeprefix(f"{kernels}/")) for name in tracked(kernels)]
    data = [(package, name) for package, name in files if not name.endswith((".py", ".md")) and name != "_experiments"]
    assert len(data) > 100

    def packed(package: str, name: str) -> bool:
        # A star of setuptools stops at a slash.
        return any(
            pattern.count("/") == name.count("/") and fnmatch.fnmatchcase(name, pattern)
            for pattern in patterns[package]
        )

    assert [name for package, name in data if not packed(package, name)] == []


def test_repacked_source_distributions_are_equal(tmp_path: Path) -> None:
    """Whoever packed it, whenever, in whatever order."""
    import build as tool  # tools/build.py

    found = []
    for index, (names, mtime, user, mode) in enumerate([("ab", 5, "me", 0o600), ("ba", 6, "you", 0o664)]):
        path = tmp_path / f"{index}.tar.gz"
        with gzip.GzipFile(path, "wb", mtime=mtime) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
            for name in names:
                member = tarfile.TarInfo(f"x/{name}")
                member.size, member.mtime, member.uname, member.mode = 1, mtime, user, mode
                tar.addfile(member, io.BytesIO(name.encode()))
        tool.repack(path, 1234567890)
        found.append(path.read_bytes())
    assert found[0] == found[1]
    assert tool.members(tmp_path / "0.tar.gz") == [("a", 1), ("b", 1)]


def test_licences_are_those_of_the_bill() -> None:
    import licences

    bill = json.loads((ROOT / "docs" / "sbom.cdx.json").read_text(encoding="utf-8"))
    assert bill["bomFormat"] == "CycloneDX"
    assert (ROOT / "docs" / "licences.md").read_text(encoding="utf-8") == licences.page(bill, PROJECT["project"])
    # Whatever pyproject.toml asks for is described; what `all` leaves out is not installed with it.
    described = {licences.normal(each["name"]) for each in bill["components"]}
    extras = licences.extras_of(PROJECT["project"])
    assert {name for name, asked in extras.items() if set(asked) - {"harness"}} <= described
    assert not re.search(r'"(/|file:|C:)', json.dumps(bill))


def test_memory_is_as_stated() -> None:
    """A few commands; the rest by hand, with tools/memory.py."""
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "memory.py", "--check",
         "--only", "help,noise-one,check-one,models,results-migrate,results-compact"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_memory_that_is_not_as_stated_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    import memory

    stated = memory.stated(memory.PAGE.read_text(encoding="utf-8"))
    assert set(stated) == {command.name for command in memory.COMMANDS}
    monkeypatch.setattr(sys, "argv", ["memory.py", "--check", "--only", "help,models"])
    monkeypatch.setattr(
        memory, "peak", lambda words, folder, asks: (1.25 * stated["help" if "--help" in words else "models"], 0)
    )
    assert memory.main() == 1
    assert "help: " in capsys.readouterr().err


def test_versions_agree() -> None:
    import theory_lab

    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert cited is not None
    assert cited[1] == theory_lab.__version__ == PROJECT["project"]["version"]
