"""A folder of small texts, made from the texts of the package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def passages() -> list[str]:
    """Paragraphs of several lines, of works in the public domain."""
    from theory_lab.probes.texts import shipped

    found = [part.strip() for text in shipped()[:3] for part in re.split(r"\n\s*\n", text.content)]
    return [part for part in found if len(part) > 300][:60]


@pytest.fixture(scope="session")
def texts(tmp_path_factory, passages) -> Path:
    """Twelve documents of five passages."""
    folder = tmp_path_factory.mktemp("texts")
    for number in range(12):
        (folder / f"{number:02}.txt").write_text("\n\n".join(passages[5 * number : 5 * number + 5]), encoding="utf-8")
    return folder
