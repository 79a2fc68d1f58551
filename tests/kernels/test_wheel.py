"""The wheel, built and unpacked apart from the sources, gives the kernels."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = """
import pathlib, sys, torch, theory_kernels
from theory_kernels import threshold_attention
assert pathlib.Path(theory_kernels.__file__).is_relative_to(sys.argv[1]), theory_kernels.__file__
x = torch.ones(1, 2, 8, 4)
assert torch.isfinite(threshold_attention(x, x, x, beta=0.5)).all()
"""


def _builder() -> str:
    try:
        return importlib.metadata.version("setuptools")
    except importlib.metadata.PackageNotFoundError:
        return "0"


@pytest.mark.skipif(int(_builder().split(".")[0]) < 77, reason="building the wheel offline needs setuptools 77")
def test_wheel_gives_the_kernels(tmp_path: Path) -> None:
    source, out, site = (tmp_path / name for name in ("source", "wheel", "site"))
    # A copy, so that the build leaves nothing in the checkout.
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("theory_lab", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    # The build backend without pip, which starts it three times.
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(out)], check=True, cwd=source, stdout=subprocess.DEVNULL)
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        assert "theory_kernels/py.typed" in file.namelist()
        file.extractall(site)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    subprocess.run([sys.executable, "-c", CODE, str(site)], check=True, env=environment, cwd=tmp_path)
