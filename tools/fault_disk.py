"""Small disks that fill up or turn read-only, and bytes that rot."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np


@contextlib.contextmanager
def small_disk(point: Path, size: str) -> Iterator[Path]:
    """A disk of a given size (root only)."""
    point.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(point)], check=True)
    try:
        yield point
    finally:
        for _ in range(100):
            if subprocess.run(["umount", str(point)], capture_output=True, check=False).returncode == 0:
                break
            time.sleep(0.1)


def remount(point: Path, options: str) -> bool:
    """Change a disk's options; whether that worked."""
    words = ["mount", "-o", f"remount,{options}", str(point)]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def can_mount(work: Path) -> bool:
    """Whether this user may mount disks."""
    if os.geteuid() != 0:
        return False
    try:
        with small_disk(work / "mount-test", "64k"):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def flip(raw: bytes, rng: np.random.Generator) -> bytes:
    """Bytes with 1 to 8 of them changed."""
    changed = bytearray(raw)
    for index in rng.choice(len(raw), size=min(len(raw), int(rng.integers(1, 9))), replace=False):
        changed[index] ^= int(rng.integers(1, 256))
    return bytes(changed)
