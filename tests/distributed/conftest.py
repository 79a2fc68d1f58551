"""One local cluster for all tests of this folder: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("distributed", reason="dask.distributed is not installed")

from odd_studies import OddStudies, process_ids

from theory_lab.distributed.address import Scheduler
from theory_lab.distributed.cluster import Cluster


@pytest.fixture(scope="package")
def started() -> Iterator[Cluster]:
    with Cluster(Scheduler(workers=2), memory=10**9) as made:
        made._client.register_plugin(OddStudies())
        yield made


@pytest.fixture
def cluster(started: Cluster) -> Cluster:
    """Both workers are there, though a test before may have ended one."""
    process_ids(started)
    return started
