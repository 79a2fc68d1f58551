"""What is written beside results about the code that made them."""

from __future__ import annotations

import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from theory_lab import __version__
from theory_lab.errors import InputError
from theory_lab.streams import STREAM_VERSION


@cache
def provenance() -> dict[str, Any]:
    """Versions and, in a source checkout, the commit: everything about the code, nothing about the host."""
    versions = {name: metadata.version(name) for name in ("numpy", "scipy", "pandas")}
    return {"theory_lab": __version__, "stream": STREAM_VERSION, "commit": _commit(), **versions}


def _commit() -> str | None:
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def require_pyarrow() -> None:
    """Raise InputError if Parquet files cannot be handled."""
    try:
        import pyarrow  # noqa: F401  # only whether it is there
    except ImportError:
        raise InputError("out", "pyarrow is not installed", "pip install 'theory-lab[cli]' to keep results") from None
