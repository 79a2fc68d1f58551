"""Does a wheel work where nothing else is? Installs it into bare virtual environments and uses it as a person would.

    python tools/smoke.py dist/theory_lab-0.1.0-py3-none-any.whl
    python tools/smoke.py WHEEL --python python3.13 --models --with numpy==2.1.3

Three environments in a temporary folder: minimal (the library alone, without a command line), the command line with
pictures, and with --models the language models too (torch, some hundred megabytes or more). Each line says what was
tried; the exit code is 0 if all of it worked.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_LIBRARY = """
import importlib.util, pathlib, sys
import theory_lab
home = pathlib.Path(theory_lab.__file__).resolve()
assert home.is_relative_to(pathlib.Path(sys.prefix).resolve()), home
assert importlib.util.find_spec("click") is None, "the minimal install has no command line"
rows = theory_lab.check("tda-4.3", noise=["gaussian", "two-point"], length=[64, 4096], workers=1)
assert rows.verdict.tolist() == ["HOLDS"] * 4, rows.verdict.tolist()
assert "torch" not in sys.modules and importlib.util.find_spec("torch") is None
from theory_lab.selftest import run_selftest
found = run_selftest("quick", groups=["known answers", "random streams"])
assert found.passed, found.to_text()
print(len(rows), "cells hold")
"""

_NO_COMMAND_LINE = "pip install 'theory-lab[cli]'"


class Failed(Exception):
    """A step of the smoke test that did not work."""


class Environment:
    """A bare virtual environment, and an empty folder to work in."""

    def __init__(self, python: str, folder: Path, name: str, uv: bool) -> None:
        self.name, self.home, self.work = name, folder / name, folder / f"{name}-work"
        self.work.mkdir()
        # Without variables that would let other code in.
        self._env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
        self._env |= {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
        self._uv = shutil.which("uv") if uv else None
        if uv and self._uv is None:
            raise Failed("--uv: uv is not on the PATH")
        self.run([python, "-m", "venv", *(["--without-pip"] if uv else []), str(self.home)], "a bare environment")

    @property
    def python(self) -> str:
        """The interpreter inside."""
        return str(self.home / "bin" / "python")

    def install(self, *requirements: str) -> None:
        """Install, and check that what is installed fits together."""
        tool = [self._uv, "pip"] if self._uv else [self.python, "-m", "pip", "--disable-pip-version-check"]
        where = ["--python", self.python] if self._uv else []
        self.run(
            [*tool, "install", "--quiet", *where, *requirements], f"install {' '.join(_shown(requirements))}", 1800
        )
        self.run([*tool, "check", *where], "requirements fit together")

    def run(self, words: Sequence[str | None], what: str, seconds: float = 600, code: int = 0, say: str = "") -> str:
        """Run a command; its exit code has to be `code`, and `say` in its output."""
        done = subprocess.run(
            [str(word) for word in words], cwd=self.work, env=self._env, capture_output=True, text=True, timeout=seconds
        )
        output = done.stdout + done.stderr
        if done.returncode != code or say not in output or "Traceback" in output:
            raise Failed(f"{self.name}: {what}: exit code {done.returncode}, {code} expected\n{output[-3000:]}")
        print(f"ok  {self.name}: {what}", flush=True)
        return done.stdout

    def lab(self, *words: str, code: int = 0, say: str = "", seconds: float = 600) -> str:
        """Run the console script."""
        return self.run(
            [str(self.home / "bin" / "theory-lab"), *words], f"theory-lab {' '.join(words)}", seconds, code, say
        )

    def wrote(self, name: str, magic: bytes) -> None:
        """A file of that kind was left in the folder."""
        path = self.work / name
        if not path.is_file() or not path.read_bytes().startswith(magic):
            raise Failed(f"{self.name}: {name} was not written, or is of another kind")
        print(f"ok  {self.name}: {name}, {path.stat().st_size:,} bytes", flush=True)


def _shown(requirements: Sequence[str]) -> list[str]:
    return [Path(r.partition("[")[0]).name + r[r.find("[") :] if "[" in r else Path(r).name for r in requirements]


def minimal(env: Environment, wheel: str, pins: Sequence[str]) -> None:
    """The library alone."""
    env.install(wheel, *pins)
    env.run([env.python, "-c", _LIBRARY], "import, check and parts of the self-test, without torch")
    env.lab(code=2, say=_NO_COMMAND_LINE)


def command_line(env: Environment, wheel: str, pins: Sequence[str]) -> None:
    """The console script, a sweep, the self-test, a picture."""
    env.install(f"{wheel}[cli,plot]", *pins)
    use_command_line(env, Path(wheel).name.split("-")[1])
    env.lab("probe", "tda-pico", code=2, say="pip install 'theory-lab[models]'")


def use_command_line(env: Environment, version: str, short: bool = False) -> None:
    """What the command line must do wherever it is installed; `short` leaves out what versions cannot change."""
    env.lab("--version", say=version)
    sweep = ("check", "tda-4.3", "--noise", "gaussian", "--length", "64,4096", "--quiet")
    env.lab(*sweep, "--out", "results", "--format", "csv", say="HOLDS")
    env.lab(*sweep, "--out", "results", "--resume", "--plot", "picture.png")
    env.wrote("picture.png", b"\x89PNG")
    parts = ("--only", "known answers", "--only", "random streams", "--only", "noise") if short else ()
    env.lab("selftest", "--quiet", *parts, "--json", "certificate.json", say="VERDICT: PASS", seconds=1200)
    env.wrote("certificate.json", b'{\n "certificate"')
    if short:
        return
    env.lab("--help", say="selftest")
    env.lab("campaign", "list", say="runs")
    env.lab("audit", "eta", code=1, say="CONTRADICTS")
    env.lab("check", "tda-4.3", "--noise", "gaussian", "--length", "4096", "--beta", "0.8", "--quiet", code=1)
    env.lab("check", "tda-4.3", "--length", "none", code=2, say="length: none;")


def models(env: Environment, wheel: str, pins: Sequence[str]) -> None:
    """A probe of a model that the wheel brings along."""
    env.install(f"{wheel}[cli,models]", *pins)
    use_models(env)


def use_models(env: Environment) -> None:
    """A probe of a model that the wheel brings along, on the CPU."""
    env.lab("probe", "tda-pico", "--length", "64", "--windows", "1", "--quiet", say="tda-pico", seconds=600)


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("wheel", type=Path, help="the wheel to install")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environments (default: this one)")
    many: dict[str, Any] = {"action": "append", "default": [], "metavar": "REQUIREMENT"}
    parser.add_argument("--with", dest="pins", **many, help="such as numpy==2.0.2; repeatable")
    parser.add_argument("--models", action="store_true", help="install torch too, and probe a model")
    parser.add_argument("--torch", **many, help="pins of the environment with models, such as torch==2.9.0")
    parser.add_argument("--uv", action="store_true", help="install with uv instead of pip")
    given = parser.parse_args()
    if not given.wheel.is_file():
        parser.error(f"{given.wheel}: no such file")
    wheel = str(given.wheel.resolve())
    with tempfile.TemporaryDirectory(prefix="theory-lab-smoke-") as name:
        try:
            stages = [("minimal", minimal, []), ("command-line", command_line, [])]
            for stage, work, more in [*stages, *([("models", models, given.torch)] if given.models else [])]:
                env = Environment(given.python, Path(name), stage, given.uv)
                work(env, wheel, [*given.pins, *more])
                shutil.rmtree(env.home)
        except (Failed, subprocess.TimeoutExpired) as error:
            print(f"FAILED  {error}", file=sys.stderr)
            return 1
    print("the smoke test passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
