"""The command line, as a user meets it."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import theory_lab
from theory_lab.experiments import COLUMNS

SMALL = ["check", "tda-4.3", "--noise", "gaussian", "--length", "2,64"]


def test_help_is_quick_and_light() -> None:
    """Under half a second (best of five, for a busy machine), without torch or NumPy."""
    code = (
        "import sys, theory_lab.cli as c\n"
        "try: c.command.main(['--help'], prog_name='theory-lab')\n"
        "except SystemExit: pass\n"
        "print(sorted(m for m in ('torch', 'numpy', 'scipy', 'pandas', 'rich') if m in sys.modules))"
    )
    best = 9.0
    for _ in range(5):
        started = time.perf_counter()
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        best = min(best, time.perf_counter() - started)
    assert found.stdout.rstrip().endswith("[]")
    assert "check" in found.stdout
    assert best < 0.5


def test_simulation_does_not_import_torch() -> None:
    code = (
        "import sys, theory_lab; theory_lab.check('tda-4.3', noise='gaussian', length=[10, 10**6]);"
        "print([m for m in ('torch', 'click', 'rich', 'matplotlib', 'scipy.stats') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_minimal_install() -> None:
    """With NumPy, SciPy and pandas alone the core runs; what needs more says so in one line."""
    code = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('click', 'rich', 'pyarrow', 'matplotlib', 'seaborn', 'torch', 'triton'):
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
import theory_lab
rows = theory_lab.check('tda-4.6', noise='gaussian', length=[2, 10**6])
print(len(rows), set(rows.verdict))
try: theory_lab.check('tda-4.6', out='r')
except theory_lab.InputError as error: print(error)
from theory_lab.main import main
try: main()
except SystemExit as error: print(error.code)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = found.stdout.splitlines()
    assert lines[0] == "2 {'HOLDS'}"
    assert "pip install 'theory-lab[cli]'" in lines[1]
    assert lines[2] == "2"
    assert found.stderr == "theory-lab: the command line needs more packages: pip install 'theory-lab[cli]'\n"


def test_table(cli) -> None:
    found = cli(*SMALL)
    assert found.returncode == 0
    assert "HOLDS" in found.stdout
    assert "tda-4.3: E[S_i] <= kappa (TDA, Theorem 4.3)" in found.stdout
    assert "tolerance 0.01" in found.stdout
    assert "relative standard error" in found.stdout
    assert "\x1b" not in found.stdout + found.stderr


def test_json_is_one_array_and_nothing_else(cli) -> None:
    found = cli("check", "tda-4.3", "tda-4.6", "--noise", "gaussian", "--length", "64", "--format", "json")
    rows = json.loads(found.stdout)
    assert [row["claim"] for row in rows] == ["tda-4.3", "tda-4.6"]
    assert all(set(COLUMNS) == set(row) for row in rows)
    first, second = rows
    assert first["rho"] is None
    assert second["rho"] == 0.0
    assert first["estimate"] == pytest.approx(first["exact"], rel=0.02)
    assert first["ci_low"] <= first["estimate"] <= first["ci_high"]
    assert first["slack"] == pytest.approx(first["estimate"] / first["bound"])
    assert first["device"] == "cpu"
    assert first["version"] == theory_lab.__version__


def test_formats_agree(cli) -> None:
    words = ["check", "tda-4.6", "--noise", "gaussian", "--noise", "any", "--length", "2:2^20:x32"]
    array = pd.DataFrame(json.loads(cli(*words, "--format", "json").stdout))
    table = pd.read_csv(io.StringIO(cli(*words, "--format", "csv").stdout))
    binary = subprocess.run(
        [sys.executable, "-m", "theory_lab.main", *words, "--format", "parquet"], capture_output=True, check=True
    )
    parquet = pd.read_parquet(io.BytesIO(binary.stdout))
    api = theory_lab.check("tda-4.6", noise=["gaussian", "any"], length=[2, 64, 2048, 65536, 2**20])
    for frame in (array, table, parquet):
        assert frame.estimate.tolist() == api.estimate.tolist()
        assert frame.verdict.tolist() == api.verdict.tolist()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["tda-4.3", "--noise", "gaussian"], 0),
        (["tda-4.3", "--noise", "student-t:3"], 1),
        (["tda-4.3", "--noise", "student-t:3", "--controls-ok"], 0),
        (["tda-4.3", "--noise", "gaussian", "--beta", "0.8"], 1),
        (["tda-4.3-general", "--noise", "gaussian", "--beta", "0.8"], 0),
        (["tda-4.6", "--noise", "gaussian", "--rho", "0.5"], 1),
        (["tda-4.6-correlated", "--noise", "gaussian", "--rho", "0.5"], 0),
        (["tda-4.3", "--noise", "two-point", "--trials", "100"], 3),
        (["tda-4.3", "--noise", "two-point", "--bound-scale", "0.5"], 1),
        (["tda-4.3", "--noise", "gaussian", "--kappa", "20000"], 0),
        (["tda-4.3", "--estimator", "worst-case"], 0),
        (["tda-4.3", "--noise", "gaussian", "--estimator", "exact"], 0),
        (["tda-4.3", "--noise", "gaussian", "--budget", "1e7"], 0),
        (["tda-4.3", "--noise", "gaussian", "--budget", "5s", "--workers", "1"], 0),
    ],
)
def test_exit_codes(cli, words: list[str], code: int) -> None:
    found = cli("check", *words, "--length", "10^4")
    assert found.returncode == code, found.stdout + found.stderr


BAD = [
    (["--kappa", "0"], "kappa: 0.0"),
    (["--kappa", "-1"], "kappa: -1.0"),
    (["--kappa", "nan"], "kappa: nan"),
    (["--beta", "inf"], "beta: inf"),
    (["--beta", "-1"], "beta: -1.0"),
    (["--sigma", "0"], "sigma: 0.0"),
    (["--length", "0"], "length: 0"),
    (["--length", "1.5"], "length: 1.5"),
    (["--length", "9:1:x2"], "length: 9:1:x2"),
    (["--length", "2^60"], "length: 1152921504606846976"),
    (["--head-dim", "0"], "head_dim: 0"),
    (["--noise", "spherical", "--head-dim", "1"], "head_dim: 1"),
    (["--rho", "1"], "rho: 1.0"),
    (["--rho", "-1"], "rho: -1.0"),
    (["--key-rho", "-0.1"], "key_rho: -0.1"),
    (["--lambda", "1"], "lambda: 1.0"),
    (["tda-4.3", "--rho", "2"], "rho: 2.0"),
    (["--seed", "²"], "seed: ²"),
    (["--out", ""], "out: "),
    (["--noise", "gaussian", "--estimator", "worst-case"], "worst-case speaks of all laws"),
    (["--noise", "gaussian", "--trials", "4000000000000000000"], "trials: 4000000000000000000"),
    (["--kappa", "1:1000:+1", "--beta", "1:1000:+1"], "combinations"),
    (["--trials", "0"], "trials: 0"),
    (["--trials", "many"], "trials: many"),
    (["--noise", "gausian"], "did you mean 'gaussian'"),
    (["--noise", "file:scores.npy"], "not found"),
    (["--estimator", "tial"], "did you mean 'tail'"),
    (["--noise", "any", "--estimator", "tail"], "noise: any"),
    (["tda-4.6", "--noise", "any", "--rho", "0.5"], "rho: 0.5"),
    (["tda-9"], "known: tda-4.3"),
    (["--seed", "-1"], "seed: -1"),
    (["--seed", "1.5"], "seed: 1.5"),
    (["--alpha", "0"], "alpha: 0.0"),
    (["--tolerance", "-1"], "tolerance: -1.0"),
    (["--bound-scale", "0"], "bound_scale: 0.0"),
    (["--budget", "soon"], "budget: soon"),
    (["--budget", "0"], "budget: 0.0"),
    (["--workers", "0"], "workers: 0"),
    (["--format", "xml"], "'xml' is not one of"),
    (["--plot", "picture.doc"], "plot: picture.doc"),
    (["--plot", "no/where.png"], "its folder must exist"),
    (["--resume"], "resume: without --out"),
    (["--out", "/proc/nothing"], "out: /proc/nothing"),
    (["--frobnicate"], "--frobnicate"),
    (["--length"], "requires an argument"),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_input_is_one_line(cli, tmp_path: Path, words: list[str], message: str) -> None:
    found = cli("check", *words)
    assert found.returncode == 2
    assert found.stdout == ""
    assert found.stderr.startswith("theory-lab: error: ")
    assert found.stderr.count("\n") == 1
    assert message in found.stderr
    assert list(tmp_path.iterdir()) == []


def test_long_tables_are_summarized(cli) -> None:
    words = ["check", "tda-4.3", "--noise", "gaussian", "--noise", "laplace", "--length", "1:40:+1", "--trials", "1000"]
    brief, full = cli(*words), cli(*words, "--full")
    assert "--full prints all 80 rows" in brief.stdout
    assert brief.stdout.count("laplace") == 1
    assert full.stdout.count("laplace") == 80 - 40
    assert "†" in full.stdout


def test_user_scores(cli, tmp_path: Path) -> None:
    np.save(tmp_path / "scores.npy", np.random.Generator(np.random.Philox(key=8)).normal(0, 1 / 8, 5000))
    for option, claims in (("", ()), (",raw", ("tda-4.3", "tda-4.6"))):
        found = cli("check", *claims, "--noise", f"file:scores.npy{option}", "--length", "10,100", "--format", "json")
        assert found.returncode == 0, found.stderr
        assert {row["noise"] for row in json.loads(found.stdout)} == {f"file:scores.npy{option}"}
    shown = cli("noise", "file:scores.npy")
    assert "bootstrap interval" in shown.stdout
    loud = cli("check", "tda-4.3", "--noise", "file:scores.npy,raw", "--head-dim", "256", "--length", "100")
    assert "proxy is" in loud.stdout


def test_interrupt_keeps_what_is_finished(tmp_path: Path) -> None:
    """Ctrl-C, twice: finished cells stay, the way back is named, no traceback, and a resume ends well."""
    words = ["check", "tda-4.3", "--noise", "gaussian", "--length", "2:2^22:x2", "--estimator", "direct", "--out", "r"]
    process = subprocess.Popen(
        [sys.executable, "-m", "theory_lab.main", *words, "--trials", "4000"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(theory_lab.__file__).parent.parent)},
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("r/cells/*.parquet"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT)
    assert "Traceback" not in stderr
    kept = len(list(tmp_path.glob("r/cells/*.parquet")))
    assert kept >= 3
    # The second one may strike where the file that was being written is taken away; a resume does that.
    assert len(list(tmp_path.glob("r/cells/.*"))) <= 1
    if process.returncode == 130 and "continue with" in stderr:
        assert "--resume" in stderr


def test_single_interrupt_says_how_to_resume(tmp_path: Path) -> None:
    words = ["check", "tda-4.3", "--noise", "gaussian", "--length", "2:2^24:x2", "--estimator", "direct", "--out", "r"]
    process = subprocess.Popen(
        [sys.executable, "-m", "theory_lab.main", *words, "--trials", "4000"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(theory_lab.__file__).parent.parent)},
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("r/cells/*.parquet"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert re.search(r"\d+ finished cells are in r; continue with: theory-lab check tda-4\.3 .* --resume", stderr)
    assert "HOLDS" in stdout  # what is finished is shown, too


def test_terminal_shows_a_bar_and_color_unless_asked_not_to(tmp_path: Path) -> None:
    def on_terminal(**environment: str) -> str:
        master, slave = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "theory_lab.main", *SMALL],
            cwd=tmp_path, stdout=slave, stderr=slave, close_fds=True,
            env={**os.environ, "PYTHONPATH": str(Path(theory_lab.__file__).parent.parent), "TERM": "xterm-256color",
                 "COLUMNS": "150", **environment},
        )  # fmt: skip
        os.close(slave)
        chunks = []
        while True:
            try:
                chunk = os.read(master, 65536)
            except OSError:  # the other end is closed
                break
            if not chunk:
                break
            chunks.append(chunk)
        process.wait(timeout=60)
        os.close(master)
        return b"".join(chunks).decode()

    os.environ.pop("NO_COLOR", None)
    colored = on_terminal()
    assert "cells" in colored
    assert "\x1b[32m" in colored
    assert "\x1b[32m" not in on_terminal(NO_COLOR="1")


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    command = (
        f"{sys.executable} -m theory_lab.main check tda-4.3 --noise gaussian --format json --trials 100 | head -c 1"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(theory_lab.__file__).parent.parent)}
    found = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, env=environment, check=True
    )
    assert found.stdout == "["
    assert "Traceback" not in found.stderr


def test_claims_and_noise(cli) -> None:
    listed = cli("claims").stdout
    assert "tda-4.3" in listed
    assert "tda-4.6-correlated" in listed
    one = cli("claims", "tda-4.6").stdout
    for word in ("statement", "bound", "assumes", "independent", "exact value"):
        assert word in one
    assert cli("claims", "tda-9").returncode == 2
    families = cli("noise").stdout
    for name in ("gaussian", "spherical", "two-point", "student-t(3)", "file:PATH", "any"):
        assert name in families
    assert "0.2390" in cli("noise", "gaussian").stdout.replace("0.239 ", "0.2390 ")
    assert cli("noise", "gausian").returncode == 2


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(cli, shell: str) -> None:
    assert "theory-lab" in cli("completion", shell).stdout


def test_completion_suggests(cli) -> None:
    found = cli(
        env={"_THEORY_LAB_COMPLETE": "bash_complete", "COMP_WORDS": "theory-lab check tda-4.6", "COMP_CWORD": "2"}
    )
    assert "tda-4.6-correlated" in found.stdout


def test_version(cli) -> None:
    assert theory_lab.__version__ in cli("--version").stdout


def test_audit(cli) -> None:
    found = cli("audit", "tda", "--format", "json")  # the cheapest paper
    rows = json.loads(found.stdout)
    assert found.returncode == 1
    assert {"paper", "statement", "verdict"} <= rows[0].keys()
    assert any(row["verdict"] == "AGREES" for row in rows)
    assert cli("audit", "nobody").returncode == 2


def test_closed_and_full_streams(tmp_path: Path) -> None:
    def shell(redirect: str) -> subprocess.CompletedProcess[str]:
        command = (
            f"{sys.executable} -m theory_lab.main check tda-4.3 --noise gaussian --length 10 --format csv {redirect}"
        )
        environment = {**os.environ, "PYTHONPATH": str(Path(theory_lab.__file__).parent.parent)}
        return subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, env=environment)

    assert shell(">&-").returncode == 0
    quiet = shell("2>&-")
    assert quiet.returncode == 0
    assert "tda-4.3,gaussian" in quiet.stdout
    full = shell("> /dev/full")
    assert full.returncode == 2
    assert "Traceback" not in full.stderr
    assert full.stderr.rstrip().endswith("(No space left on device)")


def test_names_are_not_markup(cli, tmp_path: Path) -> None:
    for name in ("a[b].npy", "[red].npy", "x,y.npy"):
        np.save(tmp_path / name, np.linspace(-1, 1, 50))
        found = cli("check", "tda-4.3", "--noise", f"file:{name}", "--length", "10")
        assert found.returncode == 0, found.stderr
        assert name in found.stdout
    assert "E[survivors]" in cli("noise", "gaussian").stdout


def test_bugs_are_one_line(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import theory_lab.render as r, sys; sys.argv[1:] = ['claims']\n"
        "def broken(*_): raise RuntimeError('oops')\n"
        "r.print_claims = broken\n"
        "from theory_lab.main import main; main()"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 70
    assert found.stderr.count("\n") == 1
    assert "internal error (RuntimeError: oops)" in found.stderr


def test_phase(cli, tmp_path: Path) -> None:
    """Every bad word is found before the work begins."""
    for words in (["--rows", "0"], ["--seed", "x"], ["--plot", "p.doc"], ["--out", "numbers.txt"], ["--workers", "0"]):
        found = cli("phase", *words)
        assert found.returncode == 2, words
        assert found.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
