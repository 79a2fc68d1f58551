"""The recipes of docs/distributed.md, as far as they can be tried without a cluster."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "distributed.md").read_text(encoding="utf-8")


def test_the_slurm_job_starts_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script is what the recipe says; nothing is submitted."""
    jobqueue = pytest.importorskip("dask_jobqueue", reason="dask-jobqueue is not installed")
    (recipe,) = re.findall(r"```python\n(.*?SLURMCluster\(.*?)```", PAGE, re.DOTALL)
    arguments = re.search(r"SLURMCluster\((.*?)^\)$", recipe, re.DOTALL | re.MULTILINE)
    assert arguments is not None
    given = eval(f"dict({arguments.group(1)})")
    given.pop("scheduler_options")
    # The job alone, without the scheduler that a cluster starts.
    job = jobqueue.slurm.SLURMJob("tcp://10.0.0.1:8786", name="worker", **given)
    script = job.job_script()
    settings = "MALLOC_ARENA_MAX=1 MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=134217728"
    for line in ("#SBATCH -p normal", "#SBATCH -A my-account", "#SBATCH --mem=4G", "#SBATCH -t 02:00:00",
                 "source /shared/theory-lab/.venv/bin/activate", f"export OMP_NUM_THREADS=1 {settings}"):  # fmt: skip
        assert line in script.splitlines()
    (start,) = [line for line in script.splitlines() if "dask_worker" in line]
    assert "tcp://10.0.0.1:8786 --name worker --nthreads 1 --memory-limit 3.73GiB" in start
    assert "--lifetime 115m --lifetime-stagger 4m" in start


def test_the_kubernetes_cluster_is_well_formed() -> None:
    yaml = pytest.importorskip("yaml")
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    found = yaml.safe_load(text)
    assert (found["apiVersion"], found["kind"]) == ("kubernetes.dask.org/v1", "DaskCluster")
    for part in ("worker", "scheduler"):
        (container,) = found["spec"][part]["spec"]["containers"]
        assert container["args"][:2] == ["dask", part]
    ports = {port["name"] for port in found["spec"]["scheduler"]["spec"]["containers"][0]["ports"]}
    assert ports == {port["targetPort"] for port in found["spec"]["scheduler"]["service"]["ports"]}
