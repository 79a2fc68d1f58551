"""Which tasks are where: the dispatcher without a cluster and without a clock."""

from __future__ import annotations

import math
import random

import pytest

from theory_lab.distributed.address import Scheduler, asked_scheduler, parse_memory, parse_scheduler, show_memory
from theory_lab.distributed.dispatch import Batch, Dispatcher
from theory_lab.distributed.pace import FIRST_BATCHES, Pace
from theory_lab.errors import InputError

FOREVER = math.inf


def dispatcher(count: int, seconds: float = 0.01, known: bool = True) -> Dispatcher:
    pace = Pace()
    if known:
        pace.learn("kind", 1.0, 1.0)
    return Dispatcher(["kind"] * count, [seconds] * count, pace)


def everything(plan: Dispatcher, workers: int, now: float = 0.0) -> list[Batch]:
    found = []
    while (batch := plan.next(now, workers, FOREVER)) is not None:
        found.append(batch)
    return found


def test_every_task_is_sent_once_and_batches_shrink_to_the_end() -> None:
    plan = dispatcher(1000)
    sizes = []
    seen: list[int] = []
    while not plan.finished:
        for batch in everything(plan, 2):
            sizes.append(len(batch.tasks))
            seen += batch.tasks
            assert plan.done(batch.number, [0.01] * len(batch.tasks))[0] == list(range(len(batch.tasks)))
    assert seen == list(range(1000))
    assert max(sizes) == 50  # half a second
    assert sizes[-1] <= 5


def test_batches_follow_what_tasks_take() -> None:
    plan = dispatcher(1000, known=False)
    first = everything(plan, 2)
    assert all(len(batch.tasks) <= 8 for batch in first)  # nothing is known yet
    for batch in first:
        plan.done(batch.number, [1.0] * len(batch.tasks))  # a hundred times the estimate
    assert [len(batch.tasks) for batch in everything(plan, 2)] == [1, 1, 1, 1]


def test_a_large_cluster_gets_larger_batches_and_waits_for_the_first_results() -> None:
    pace = Pace(batch_cost=5e-3)
    assert pace.target(1000, 1e6) == pytest.approx(1000 * 5e-3 / 0.4)
    assert pace.target(2, 1e6) == 0.5
    assert pace.target(1000, 10.0) == 5.0  # less than a batch to each worker costs would only make them wait
    assert pace.target(2, 1e6, until=0.3) == pytest.approx(0.1)
    plan = dispatcher(100_000, known=False)
    assert len(everything(plan, 1000)) == FIRST_BATCHES


def test_nothing_is_sent_after_the_deadline_or_without_workers() -> None:
    plan = dispatcher(10)
    assert plan.next(1.0, 2, 1.0) is None
    assert plan.next(0.0, 0, FOREVER) is None
    assert not plan.finished


def test_a_late_batch_is_sent_again_and_counts_once() -> None:
    plan = dispatcher(2, seconds=0.1)
    (batch, *rest) = everything(plan, 2)
    for other in rest:
        plan.done(other.number, [0.1])
    assert plan.late(0.5, 2, FOREVER) == []
    (copy,) = plan.late(60.0, 2, FOREVER)
    assert copy.tasks == batch.tasks
    assert plan.late(60.5, 2, FOREVER) == []  # a copy waits, too
    new, needless = plan.done(copy.number, [0.1])
    assert (new, needless) == ([0], [batch.number])
    assert plan.done(batch.number, [9.0]) == ([], [])  # the first one comes back after all
    assert plan.finished


def test_a_copy_of_a_copy_waits_longer() -> None:
    plan = dispatcher(1, seconds=0.1)
    everything(plan, 2)
    (copy,) = plan.late(10.0, 2, FOREVER)
    assert plan.late(12.0, 2, FOREVER) == []
    (second,) = plan.late(20.0, 2, FOREVER)
    assert (copy.generation, second.generation) == (1, 2)


def test_a_lost_batch_is_sent_again() -> None:
    plan = dispatcher(10)
    batch = everything(plan, 2)[0]
    plan.lost(batch.number)
    assert everything(plan, 2)[0].tasks[0] == batch.tasks[0]


def test_what_ends_its_workers_is_found_and_given_up() -> None:
    """Whatever shares a batch or a worker with it: it alone is named."""
    rng = random.Random(5)
    for guilty in (0, 17, 99):
        plan = dispatcher(100, seconds=0.05)
        finished: list[int] = []
        named: list[int] = []
        for _ in range(1000):
            batches = everything(plan, 2)
            if not batches:
                break
            # Two of them share a worker with the deadly one, by chance.
            doomed = any(guilty in batch.tasks for batch in batches)
            for batch in batches:
                if guilty in batch.tasks or (doomed and rng.random() < 0.5):
                    named += plan.deadly(batch.number)
                else:
                    new, _ = plan.done(batch.number, [0.05] * len(batch.tasks))
                    finished += [batch.tasks[position] for position in new]
        assert named == [guilty] == list(plan.given_up)
        assert sorted(finished) == [index for index in range(100) if index != guilty]
        assert plan.finished


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("local", Scheduler()),
        ("local:3", Scheduler(workers=3)),
        ("tcp://node-1.cluster:8786", Scheduler("tcp://node-1.cluster:8786")),
        ("tls://[fe80::1]:8786", Scheduler("tls://[fe80::1]:8786")),
    ],
)
def test_schedulers(text: str, expected: Scheduler) -> None:
    assert parse_scheduler(text) == expected


@pytest.mark.parametrize(
    "text", ["", "locale", "local:", "local:0", "local:x", "local:5000", "host:8786", "tcp://", "tcp://h", "tcp://h:0",
             "tcp://h:99999", "http://h:1", "tcp://h:1/x", "tcp://h h:1", "local:٣"],
)  # fmt: skip
def test_bad_schedulers(text: str) -> None:
    with pytest.raises(InputError, match="scheduler"):
        parse_scheduler(text)


def test_the_environment_says_what_the_option_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THEORY_LAB_SCHEDULER", raising=False)
    assert asked_scheduler(None) is None
    monkeypatch.setenv("THEORY_LAB_SCHEDULER", "tcp://there:1")
    assert asked_scheduler(None) == Scheduler("tcp://there:1")
    assert asked_scheduler("local") == Scheduler()


@pytest.mark.parametrize(
    ("text", "size"), [("1GiB", 2**30), ("1.5 GB", 1_500_000_000), ("800m", 800 * 10**6), ("2g", 2 * 10**9)]
)
def test_memory(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "lots", "-1GB", "1GiBB", "100MB", "1e9", "9999TiB", "0x10"])
def test_bad_memory(text: str) -> None:
    with pytest.raises(InputError, match="worker-memory"):
        parse_memory(text)


def test_memory_is_shown() -> None:
    assert show_memory(2**30) == "1 GiB"
