"""Try a wheel over versions of Python, NumPy, torch and triton, one bare environment after another.

    python tools/matrix.py dist/theory_lab-0.1.0-py3-none-any.whl --out matrix.json
    python tools/matrix.py WHEEL --out matrix.json --only torch     # cells whose name holds that word
    python tools/matrix.py WHEEL --out matrix.json --smoke          # without test files, but those of Triton
    python tools/matrix.py --table matrix.json                      # as Markdown

Every cell installs the wheel, uses it as the smoke test does (tools/smoke.py), and runs a few test files of this
checkout against what is installed. What is found in the file already is not tried again, unless it failed. Needs uv;
interpreters are looked for as python3.11, python3.12 and python3.13.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import smoke

ROOT = Path(__file__).resolve().parent.parent

_CORE_TESTS = ("tests/noise/test_families.py", "tests/claims")
_TORCH_TESTS = ("tests/attention/test_mechanism_values.py",)
_TRITON_TESTS = ("tests/kernels/test_exceedance.py",)
_TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis", "mpmath")
_VERSIONS = """
import importlib.metadata as m, json, platform
names = ["numpy", "scipy", "pandas", "pyarrow", "matplotlib", "click", "torch", "triton", "transformers"]
found = {"python": platform.python_version()}
for name in names:
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Cell:
    """A combination: a name, an interpreter, extras of the wheel and what is pinned beside it."""

    name: str
    python: str
    extras: str = "cli,plot"
    pins: tuple[str, ...] = ()

    @property
    def torch(self) -> bool:
        """Whether the cell has torch."""
        return "models" in self.extras


def lowest(*extras: str) -> tuple[str, ...]:
    """The least version of everything that the core and the extras name, as pins such as ``numpy==2.0.*``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [*project["dependencies"], *(each for e in extras for each in project["optional-dependencies"][e])]
    return tuple(each.replace(">=", "==") + ".*" for each in named)


def cells() -> Iterator[Cell]:
    """The matrix."""
    for python in ("python3.11", "python3.12", "python3.13"):
        yield Cell(f"latest, {python}", python)
    yield Cell("lowest of everything, python3.11", "python3.11", pins=lowest("cli", "plot"))
    for numpy in ("2.0", "2.1", "2.2", "2.3"):
        yield Cell(f"numpy {numpy}", "python3.11", pins=(f"numpy=={numpy}.*",))
    yield Cell("numpy 2.1, python3.13", "python3.13", pins=("numpy==2.1.*",))
    for torch in ("2.9", "2.10", "2.11", "2.12", "2.13", "2.14", "2.15"):
        # torch for Linux asks for one triton: the wheel's extra "models" leaves the choice to it.
        yield Cell(f"torch {torch}", "python3.12", "cli,plot,models", (f"torch=={torch}.*",))
    for python in ("python3.11", "python3.13"):
        yield Cell(f"torch latest, {python}", python, "cli,plot,models", ("torch>=2.15",))


def try_cell(cell: Cell, wheel: Path, smoke_only: bool = False) -> dict[str, Any]:
    """Everything about a cell; `failed` says what did not work, and is empty where all did."""
    started, found = time.time(), {"cell": cell.name, "versions": {}, "steps": [], "failed": ""}
    with tempfile.TemporaryDirectory(prefix="theory-lab-matrix-") as name:
        folder = Path(name)
        try:
            env = smoke.Environment(cell.python, folder, "cell", uv=True)
            env.install(f"{wheel}[{cell.extras}]", *cell.pins)
            found["versions"] = json.loads(env.run([env.python, "-c", _VERSIONS], "versions"))
            smoke.use_command_line(env, wheel.name.split("-")[1], short=True)
            found["steps"].append("command line, picture, half of the self-test")
            if cell.torch:
                smoke.use_models(env)
                found["steps"].append("probe")
            env.install(*_TEST_TOOLS, *(f"{k}=={v}" for k, v in found["versions"].items() if k in ("numpy", "torch")))
            tests = [*_CORE_TESTS, *(_TORCH_TESTS if cell.torch else ())]
            if not smoke_only:
                found["steps"].append(_pytest(env, folder, tests, ""))
            if "triton" in found["versions"]:
                # In Triton's interpreter: without a GPU.
                found["steps"].append(_pytest(env, folder, list(_TRITON_TESTS), "gaussian-None") + " (triton)")
        except (smoke.Failed, subprocess.TimeoutExpired) as error:
            found["failed"] = str(error)
    found["seconds"] = round(time.time() - started)
    return found


def _pytest(env: smoke.Environment, folder: Path, tests: list[str], chosen: str) -> str:
    """Run test files from a copy that holds no package, so that what is installed is what is tested."""
    copy = folder / "checkout"
    if not copy.exists():
        copy.mkdir()
        shutil.copy(ROOT / "pyproject.toml", copy)
        shutil.copytree(ROOT / "tests", copy / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    env.work = copy
    call = [env.python, "-P", "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
    # Another version's deprecations are no failure here; they are errors where versions are pinned.
    call += ["-o", "filterwarnings=default", "-W", "ignore::DeprecationWarning", *tests]
    said = env.run([*call, *(["-k", chosen] if chosen else [])], f"tests {' '.join(tests)}", 1800)
    return next(line for line in reversed(said.splitlines()) if " passed" in line).strip("= ")


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| cell | versions | what ran | outcome |", "|---|---|---|---|"]
    for row in rows:
        versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        outcome = "ok" if not row["failed"] else f"FAILED: {row['failed'].splitlines()[0][:160]}"
        lines.append(f"| {row['cell']} | {versions} | {'; '.join(row['steps'])} | {outcome} |")
    return "\n".join(lines)


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("wheel", type=Path, nargs="?", help="the wheel to try")
    parser.add_argument("--out", type=Path, default=Path("matrix.json"), help="where results are kept")
    parser.add_argument("--only", default="", metavar="WORD", help="cells whose name holds this")
    parser.add_argument("--smoke", action="store_true", help="leave the test files out, but those of Triton")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the results in FILE as Markdown, and stop")
    given = parser.parse_args()
    if given.table:
        print(table(json.loads(given.table.read_text(encoding="utf-8"))))
        return 0
    if given.wheel is None or not given.wheel.is_file():
        parser.error("a wheel is needed")
    rows: dict[str, dict[str, Any]] = {}
    if given.out.exists():
        rows = {row["cell"]: row for row in json.loads(given.out.read_text(encoding="utf-8"))}
    for cell in cells():
        if given.only not in cell.name or (cell.name in rows and not rows[cell.name]["failed"]):
            continue
        print(f"--  {cell.name}", flush=True)
        rows[cell.name] = try_cell(cell, given.wheel.resolve(), given.smoke)
        print(
            f"{'FAILED' if rows[cell.name]['failed'] else 'ok'}  {cell.name}: {rows[cell.name]['seconds']} s",
            flush=True,
        )
        ordered = [rows[each.name] for each in cells() if each.name in rows]
        given.out.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    return int(any(row["failed"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
