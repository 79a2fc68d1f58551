"""What a command that failed left in a folder."""

from __future__ import annotations

from pathlib import Path


def leftovers(folder: Path) -> list[str]:
    """What a fetch that failed left behind; its lock file may stay."""
    return [str(path) for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock")]
