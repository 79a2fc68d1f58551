"""Runs that are told to end: what is finished is kept, and no worker stays behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from theory_lab.experiments import COLUMNS, Settings, run
from theory_lab.store import Store

ROOT = Path(__file__).resolve().parent.parent
RESULTS = [name for name in COLUMNS if name != "seconds"]


def started(*words: str, **more: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True, **more,
    )  # fmt: skip


def running(group: int) -> bool:
    """Whether a process of the group is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, 0)
        return True
    return False


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(there: object, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_sigterm_is_like_ctrl_c(tmp_path: Path) -> None:
    """Sent to the whole group, as batch systems do it: workers that end first are no error of their own."""
    grid = ("tda-4.3", "--noise", "gaussian", "--length", "2:2^20:x4", "--kappa", "1,2,3,4")
    words = ("check", *grid, "--workers", "2", "--out", "out", "--quiet", "--format", "csv")
    process = started("-m", "theory_lab.main", *words, cwd=tmp_path)
    wait_until(lambda: list(tmp_path.glob("out/cells/*.parquet")))
    os.killpg(process.pid, signal.SIGTERM)
    out, said = process.communicate(timeout=30)
    assert process.returncode == 143, said
    assert said.startswith("theory-lab: error: interrupted\n")
    assert "Traceback" not in said
    assert out.startswith("claim,")
    wait_until(lambda: not running(process.pid), 30.0)  # as long as the fault harness grants
    settings = Settings(("tda-4.3",), ("gaussian",), (*(2 * 4**k for k in range(10)), 2**20), (1.0, 2.0, 3.0, 4.0))
    resumed = run(settings, workers=1, store=Store(tmp_path / "out", resume=True))
    kept = pd.read_csv(pd.io.common.StringIO(out))
    assert 0 < len(kept) < len(resumed)
    merged = kept.merge(resumed, on=["noise", "length", "kappa"], suffixes=("", "_resumed"))
    assert len(merged) == len(kept)
    assert (merged.estimate == merged.estimate_resumed).all()


_SIGNALS = """
import os, signal
from theory_lab.ending import Terminated, exit_code, handle_termination
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
handle_termination()
os.kill(os.getpid(), signal.SIGHUP)
try:
    os.kill(os.getpid(), signal.SIGTERM)
except Terminated:
    os.kill(os.getpid(), signal.SIGTERM)
    print("written", exit_code(130))
"""


def test_a_second_sigterm_does_not_disturb_what_the_first_began() -> None:
    process = started("-c", _SIGNALS)
    out, said = process.communicate(timeout=30)
    assert (out, said, process.returncode) == ("written 143\n", "", 0)


_CAMPAIGN = """
import os, sys, time
from theory_lab.campaigns import work
from theory_lab.ending import handle_termination
if __name__ == "__main__":
    handle_termination()
    try:
        with work._pool(("cpu",), 1) as pool:
            print(pool.submit(os.getpid).result(), flush=True)
            pool.submit(time.sleep, 60.0).result()
    except KeyboardInterrupt:
        print("ended", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_workers_of_a_campaign_end_with_it(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "campaign.py").write_text(_CAMPAIGN)
    process = started("campaign.py", cwd=tmp_path)
    worker = int(process.stdout.readline())
    assert alive(worker)
    process.send_signal(number)
    wait_until(lambda: not alive(worker), 10.0)
    out, _ = process.communicate(timeout=10)
    assert out == ("ended\n" if number == signal.SIGTERM else "")


_DEFERRED = """
import os, signal, subprocess, sys
from theory_lab.ending import deferred, exit_code, handle_termination
handle_termination()
try:
    with deferred(signal.SIGINT, signal.SIGTERM):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.2); print('child', flush=True)"])
        child.send_signal(signal.SIGTERM)  # blocked there as here
        os.kill(os.getpid(), signal.SIGTERM)
        child.wait()
        print("started", flush=True)
    print("lost")
except KeyboardInterrupt:
    print("interrupted", exit_code(130), child.returncode)
try:
    os.kill(os.getpid(), signal.SIGINT)
    print("lost")
except KeyboardInterrupt:
    print("as before")
"""


def test_a_signal_while_processes_are_started_is_deferred() -> None:
    process = started("-c", _DEFERRED)
    out, said = process.communicate(timeout=30)
    assert (out, said, process.returncode) == ("child\nstarted\ninterrupted 143 0\nas before\n", "", 0)


def test_a_signal_while_dask_workers_start_is_not_lost(tmp_path: Path) -> None:
    """Sent to the whole group as soon as the first of them is there: one line, no results folder, no process left.

    SIGHUP is the hardest: multiprocessing's own process, which knows Ctrl-C and SIGTERM, would die of it.
    """
    words = ("check", "tda-4.3", "--noise", "gaussian", "--length", "2:2^20:x4", "--kappa", "1,2,3,4", "--out", "out")
    process = started("-m", "theory_lab.main", *words, "--scheduler", "local", "--workers", "2", cwd=tmp_path)
    wait_until(lambda: spawned(process.pid) or process.poll() is not None)
    os.killpg(process.pid, signal.SIGHUP)
    out, said = process.communicate(timeout=60)
    assert process.returncode == 129, said
    assert said.strip() == "theory-lab: error: interrupted"
    assert out == ""
    assert not (tmp_path / "out").exists()
    wait_until(lambda: not running(process.pid), 30.0)  # as long as the fault harness grants


def spawned(group: int) -> bool:
    """Whether multiprocessing has started a worker in the group."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, IndexError):
            if entry.name.isdigit() and b"spawn_main" in (entry / "cmdline").read_bytes():
                words = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(words[2]) == group:
                    return True
    return False
