"""The workflows under .github say what they should: they run elsewhere, so that only this sees them fall behind."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def commands(workflow: dict[str, Any]) -> list[str]:
    return [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_actions_are_pinned_and_permissions_least(path: Path) -> None:
    workflow = load(path)
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert "permissions" not in job, name
        assert job["timeout-minutes"] <= 180, name
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", step["uses"]), step
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False, name
        # Nothing from outside is pasted into a shell.
        assert not any("${{" in command for command in commands(workflow))


def test_changes_pass_what_ci_run_asks() -> None:
    asked = re.findall(r"^make \w+", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    done = [" ".join(command.split()[:2]) for command in commands(load(ROOT / ".github" / "workflows" / "ci.yml"))]
    assert len(asked) >= 3
    assert set(asked) <= set(done)


def test_every_supported_python_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    supported = [c.rpartition(" ")[2] for c in project["classifiers"] if re.search(r":: 3\.\d+$", c)]
    jobs = load(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]
    for name in ("test", "smoke"):
        assert jobs[name]["strategy"]["matrix"]["python"] == supported


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_commands_exist(path: Path) -> None:
    """Tools and their options, and targets of the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in commands(load(path)):
        words = command.split()
        if words[0] == "make":
            target = words[1].replace(".venv", "$(VENV)")
            assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), command
        tools = [word for word in words if word.startswith("tools/")]
        for tool in tools:
            text = (ROOT / tool).read_text(encoding="utf-8")
            for option in (word for word in words if word.startswith("--")):
                assert f'"{option}"' in text, f"{tool} has no {option}"
