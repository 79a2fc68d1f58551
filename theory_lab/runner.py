"""One run: draw what is missing, keep what is finished, decide, and make rows."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from theory_lab import __version__
from theory_lab.cases import Case, evaluate
from theory_lab.engine import Engine, PieceTask, Task, TaskResult, merge, plan_tasks
from theory_lab.estimation import BlockSum, Cell, Sample, default_trials, sampler
from theory_lab.estimation.intervals import Interval, interval
from theory_lab.estimation.verdicts import Decision, Test, Verdict, decide
from theory_lab.settings import Budget, Progress, Settings
from theory_lab.studies import Finding, Piece

if TYPE_CHECKING:
    import pandas as pd

    from theory_lab.store import Store


@dataclass
class Work:
    """A cell under way."""

    cell: Cell
    target: int = 0
    blocks: list[BlockSum] = field(default_factory=list)
    seconds: float = 0.0
    looks: int = 0
    pending: int = 0
    saved: bool = True
    pooled: bool = False  # the store had it whole: its blocks are one
    _sample: tuple[list[BlockSum], Sample] | None = None

    @property
    def trials(self) -> int:
        """Trials drawn so far."""
        return sum(block.trials for block in self.blocks)

    def sample(self) -> Sample:
        """The pooled observations."""
        if self._sample is None or self._sample[0] is not self.blocks:  # which is replaced, never changed
            self._sample = self.blocks, sampler(self.cell).pool(self.cell, self.blocks)
        return self._sample[1]

    @cached_property
    def random(self) -> bool:
        """Whether there is anything to draw."""
        return (self.sample() if self.blocks else sampler(self.cell).empty_sample(self.cell)).model != "certain"


#: Columns of a row, in order.
COLUMNS = (
    "claim", "noise", "length", "head_dim", "kappa", "beta", "sigma", "rho", "key_rho", "lambda", "estimator",
    "trials", "estimate", "standard_error", "relative_error", "ci_low", "ci_high", "ci_error", "method", "bound",
    "exact", "slack", "verdict", "assumptions", "note", "seed", "device", "seconds", "version",
)  # fmt: skip

_FLOATS = ("kappa", "beta", "sigma", "rho", "key_rho", "lambda", "standard_error", "relative_error", "exact", "slack")
_CONSTANTS = ("head_dim", "kappa", "beta", "sigma", "rho", "key_rho", "lambda")


class Runner:
    """State of one run."""

    def __init__(
        self,
        settings: Settings,
        cases: Sequence[Case],
        pieces: Sequence[Piece],
        store: Store | None,
        progress: Progress,
    ) -> None:
        self._settings = settings
        self._cases = cases
        self._pieces = pieces
        self._store = store
        self._progress = progress
        cells = dict.fromkeys(cell for case in cases if (cell := case.cell(settings.seed)) is not None)
        self._works = {cell: Work(cell) for cell in cells}
        self._findings: dict[Piece, tuple[tuple[Finding, ...], float]] = {}
        self._unsaved: list[Work] = []
        self._certain = {case: evaluate(case) for case in cases if case.cell(settings.seed) is None}

    def load(self) -> None:
        """Set every cell's target and take what the store has."""
        for work in self._works.values():
            work.target = self._settings.trials or default_trials(work.cell)
            if self._store is not None:
                self._load(work, self._store)
        if self._store is None:
            return
        for piece in self._pieces:
            found, damage = self._store.load_piece(piece, self._settings.seed)
            if damage:
                self._progress.say(f"{damage}; it is drawn again")
            if found is not None:
                self._findings[piece] = found, self._store.seconds(piece.digest(self._settings.seed))

    def _load(self, work: Work, store: Store) -> None:
        work.seconds = store.seconds(work.cell.digest)
        # A sequential run looks at a cell at several sizes, and needs its blocks.
        whole = store.pooled(work.cell, work.target) if self._settings.budget is None else None
        if whole is not None:
            work.blocks, work.pooled = [whole], True
            return
        work.blocks, damage = store.load(work.cell)
        if damage:
            self._progress.say(f"{damage}; it is drawn again")

    def fixed(self, engine: Engine) -> None:
        """Draw every cell's trials."""
        tasks = self.tasks()
        total = len(self._works) + len(self._pieces)
        left = {task.cell if isinstance(task, Task) else task.piece for task in tasks}
        self._progress.start(total, total - len(left), sum(task.seconds for task in tasks))
        self._draw(engine, tasks)

    def tasks(self) -> list[Task | PieceTask]:
        """What is missing of every cell's trials and of the pieces."""
        missing = [work for work in self._works.values() if not work.pooled]
        for work in missing:
            work.blocks = _cut_blocks(work.blocks, work.cell, work.target)
        cells = [task for work in missing for task in plan_tasks(work.cell, work.target, work.blocks)]
        # Long pieces first: they cannot be cut, and would leave a worker alone at the end.
        return [*self._piece_tasks(), *cells]

    def counts(self) -> tuple[int, int]:
        """Cells and pieces, those that are finished included."""
        return len(self._works), len(self._pieces)

    def take(self, results: Iterable[TaskResult]) -> None:
        """Take results that were drawn elsewhere; nothing is stored."""
        for result in results:
            if isinstance(result.task, Task):
                work = self._works[result.task.cell]
                work.blocks = merge(work.blocks, result.blocks)

    def _piece_tasks(self) -> list[PieceTask]:
        missing = [piece for piece in self._pieces if piece not in self._findings]
        return [PieceTask(p, self._settings.seed) for p in sorted(missing, key=lambda p: -p.cost)]

    def sequential(self, engine: Engine, budget: Budget) -> None:
        """Double the trials of undecided cells until all are decided or the budget is spent."""
        deadline = time.monotonic() + budget.seconds
        cap = self._settings.trials or math.inf
        spent = 0
        # What the store has is dealt out as if drawn now, so that a resumed run looks at the same sizes.
        stored = {work.cell: work.blocks for work in self._works.values()}
        for work in self._works.values():
            work.blocks = []
            first = sampler(work.cell).block_trials(work.cell)
            work.target = int(min(first, max(1, default_trials(work.cell) >> 4), cap))
        pieces = self._piece_tasks()
        # How much a sequential run will draw is not known; its cells are what can be counted.
        self._progress.start(len(self._works) + len(pieces), 0, float(len(self._works) + len(pieces)))
        self._draw(engine, pieces, deadline)
        active = list(self._works.values())
        while active and time.monotonic() < deadline:
            affordable = []
            for work in active:
                # The last step of a cell is what is left of the budget.
                step = int(min(work.target - work.trials, budget.trials - spent))
                if step > 0:
                    work.target = work.trials + step
                    spent += step
                    affordable.append(work)
            before = {work.cell: work.blocks for work in affordable}
            tasks = []
            for work in affordable:
                work.blocks = _cut_blocks(merge(work.blocks, stored[work.cell]), work.cell, work.target)
                tasks += plan_tasks(work.cell, work.target, work.blocks)
            self._draw(engine, tasks, deadline, count=False)
            for work in affordable:
                if work.trials > sum(block.trials for block in before[work.cell]):
                    work.looks += 1
                else:  # cut short before anything new was complete
                    work.blocks = before[work.cell]
            undecided = self._undecided_cells()
            left = [w for w in affordable if w.cell in undecided and w.trials == w.target and w.target < cap]
            self._progress.advance(len(active) - len(left), float(len(active) - len(left)))
            for work in left:
                work.target = int(min(2 * work.target, cap))
            active = left

    def _draw(
        self, engine: Engine, tasks: Sequence[Task | PieceTask], deadline: float = math.inf, count: bool = True
    ) -> None:
        for task in tasks:
            if isinstance(task, Task):
                self._works[task.cell].pending += 1
        try:
            for results in engine.run(tasks, deadline):
                for result in results:
                    self._take(result, count)
                self._save()
        finally:
            # Blocks of a cell that was cut short are kept up to the first gap.
            for work in self._works.values():
                if work.pending:
                    work.pending = 0
                    work.blocks = _contiguous(work)
                    self._unsaved.append(work)
            self._save()

    def _take(self, result: TaskResult, count: bool) -> None:
        if isinstance(result.task, PieceTask):
            piece = result.task.piece
            self._findings[piece] = result.findings, result.seconds
            if self._store is not None:
                self._store.save_piece(piece, self._settings.seed, result.findings, result.seconds)
            self._progress.advance(1, result.task.seconds if self._settings.budget is None else 1.0)
            return
        work = self._works[result.task.cell]
        work.blocks = merge(work.blocks, result.blocks)
        work.seconds += result.seconds
        work.saved = False
        work.pending -= 1
        if work.pending == 0:
            self._unsaved.append(work)
        if count:
            self._progress.advance(int(work.pending == 0), result.task.seconds)

    def _save(self) -> None:
        """Write the cells that are complete, or cut short, and not written yet."""
        ready = [work for work in self._unsaved if not work.saved and work.blocks]
        if self._store is not None and ready:
            self._store.save_many([(work.cell, work.blocks, work.seconds) for work in ready])
        for work in self._unsaved:
            work.saved = True
        self._unsaved = []

    def _interval(self, case: Case, error: float) -> Interval:
        cell = case.cell(self._settings.seed)
        if cell is None:
            return self._certain[case].interval
        work = self._works[cell]
        return interval(work.sample(), error, work.looks, case.bound)

    def _is_random(self, case: Case) -> bool:
        cell = case.cell(self._settings.seed)
        return cell is not None and self._works[cell].random

    def _tests(self, cases: Sequence[Case]) -> list[Test]:
        return [Test(case.bound, partial(self._interval, case), self._is_random(case)) for case in cases]

    def _undecided_cells(self) -> set[Cell | None]:
        """Cells with a case that has no verdict yet."""
        tests = self._tests(self._cases)
        for findings, _ in self._findings.values():  # they share the run's error rate
            tests += map(self._finding_test, findings)
        decisions = decide(tests, self._settings.alpha, self._settings.tolerance)
        return {
            case.cell(self._settings.seed)
            for case, decision in zip(self._cases, decisions, strict=False)
            if decision.verdict is Verdict.INCONCLUSIVE
        }

    def _finished(self, case: Case) -> bool:
        cell = case.cell(self._settings.seed)
        return cell is None or 0 < self._works[cell].target <= self._works[cell].trials

    def rows(self, finished_only: bool = False) -> pd.DataFrame:
        """One row a case and a finding; only those of finished cells if asked."""
        import numpy as np
        import pandas as pd

        from theory_lab.catalog import CATALOG

        cases = [c for c in self._cases if not finished_only or self._finished(c)]
        found = [
            (piece, finding, seconds)
            for piece in self._pieces
            if piece in self._findings
            for findings, seconds in [self._findings[piece]]
            for finding in findings
        ]
        tests = self._tests(cases) + [self._finding_test(finding) for _, finding, _ in found]
        decisions = decide(tests, self._settings.alpha, self._settings.tolerance)
        rows = [self._row(case, decision) for case, decision in zip(cases, decisions, strict=False)]
        rows += [
            self._finding_row(piece, finding, seconds, decision)
            for (piece, finding, seconds), decision in zip(found, decisions[len(cases) :], strict=True)
        ]
        order = {name: index for index, name in enumerate(CATALOG)}
        rows.sort(key=lambda row: order[row["claim"]])
        columns: dict[str, Any] = {name: [row.get(name, math.nan) for row in rows] for name in COLUMNS}
        # With their types from the start: each column that is set or converted later costs as much as a small cell.
        for name in _FLOATS:
            columns[name] = np.array(columns[name], dtype=float)
        for name in ("length", "head_dim"):
            columns[name] = pd.array(columns[name], dtype="Int64")
        return pd.DataFrame(columns)

    def _finding_test(self, finding: Finding) -> Test:
        bound = finding.bound * self._settings.bound_scale
        sample, trend = finding.sample, finding.trend
        if sample is not None:
            return Test(bound, lambda error: interval(sample, error), sample.model != "certain")
        if trend is not None:
            return Test(bound, lambda error: Interval(*trend.interval(error), "trend"))
        return Test(bound, lambda error: Interval(finding.low, finding.high, "certain"), random=False)

    def _finding_row(self, piece: Piece, finding: Finding, seconds: float, decision: Decision) -> dict[str, Any]:
        estimate, standard_error = finding.estimate, 0.0
        if finding.sample is not None:
            estimate, standard_error = finding.sample.estimate, finding.sample.standard_error
        elif finding.trend is not None:
            estimate, standard_error = finding.trend.slope, finding.trend.standard_error
        bound = finding.bound * self._settings.bound_scale
        how = decision.interval.method
        return {
            **dict.fromkeys(_CONSTANTS),
            **finding.parameters,
            "claim": piece.study,
            "noise": finding.subject,
            "length": finding.length,
            "estimator": "study",
            "trials": finding.trials,
            "estimate": estimate,
            "standard_error": standard_error,
            "relative_error": _relative(finding, estimate, standard_error),
            "ci_low": decision.interval.low,
            "ci_high": decision.interval.high,
            "ci_error": decision.error,
            "method": finding.method if how == "certain" and finding.method else how,
            "bound": bound,
            "exact": finding.exact,
            "slack": _slack(estimate, bound),
            "verdict": str(decision.verdict),
            "assumptions": finding.assumptions,
            "note": finding.note,
            **self._common(seconds),
        }

    def _common(self, seconds: float, device: str = "cpu") -> dict[str, Any]:
        return {"seed": self._settings.seed, "device": device, "seconds": seconds, "version": __version__}

    def _row(self, case: Case, decision: Decision) -> dict[str, Any]:
        point, cell = case.point, case.cell(self._settings.seed)
        exact = case.claim.exact(point)
        if cell is None:
            known = self._certain[case]
            estimate, method, note, seconds = known.estimate, known.method, known.note, known.seconds
            trials, standard_error = 0, 0.0 if case.estimator == "exact" else math.nan
        else:
            work = self._works[cell]
            sample = work.sample()
            estimate, trials, seconds = sample.estimate, sample.trials, work.seconds
            standard_error, method, note = sample.standard_error, decision.interval.method, ""
        return {
            "claim": case.claim.id,
            "noise": point.noise,
            "length": point.length,
            "head_dim": point.head_dim,
            "kappa": point.kappa,
            "beta": point.beta,
            "sigma": point.sigma,
            "rho": point.rho if "rho" in case.claim.parameters else None,
            "key_rho": point.key_rho,
            "lambda": None,
            "estimator": case.estimator,
            "trials": trials,
            "estimate": estimate,
            "standard_error": standard_error,
            "relative_error": standard_error / estimate if estimate else (0.0 if method == "certain" else math.nan),
            "ci_low": decision.interval.low,
            "ci_high": decision.interval.high,
            "ci_error": decision.error,
            "method": method,
            "bound": case.bound,
            "exact": exact,
            "slack": _slack(estimate, case.bound),
            "verdict": str(decision.verdict),
            "assumptions": "; ".join(case.claim.unmet(point)) or "met",
            "note": note,
            **self._common(seconds, case.device),
        }


def _slack(estimate: float, bound: float) -> float:
    """estimate / bound; two zeros agree."""
    if bound > 0:
        return estimate / bound
    return 0.0 if estimate == bound else math.nan


def _relative(finding: Finding, estimate: float, standard_error: float) -> float:
    """Relative standard error; a slope that should be 0 has none."""
    if finding.trend is not None:
        return math.nan
    return standard_error / abs(estimate) if estimate else 0.0 if standard_error == 0 else math.nan


def _cut_blocks(blocks: Iterable[BlockSum], cell: Cell, trials: int) -> list[BlockSum]:
    """The blocks of a run of ``trials`` trials, without what a longer run left in the store."""
    size = sampler(cell).block_trials(cell)
    return [b for b in blocks if b.trials == min(size, trials - b.block * size)]


def _contiguous(work: Work) -> list[BlockSum]:
    """Blocks before the first gap, and before the first one cut short."""
    size = sampler(work.cell).block_trials(work.cell)
    kept = []
    for expected, block in enumerate(work.blocks):
        if block.block != expected:
            break
        kept.append(block)
        if block.trials < size:
            break
    return kept
