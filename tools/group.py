"""Print the requirements of a dependency group of pyproject.toml, for pip versions that do not know groups."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any


def requirements(groups: dict[str, list[Any]], name: str) -> list[str]:
    """Requirements of a group, with the groups that it includes."""
    found: list[str] = []
    for item in groups[name]:
        found += requirements(groups, item["include-group"]) if isinstance(item, dict) else [item]
    return found


if __name__ == "__main__":
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))
    print(" ".join(requirements(project["dependency-groups"], sys.argv[1])))
