"""One run: draw what is missing, keep what is finished, decide, and make rows."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from theory_lab import __version__
from theory_lab.case_rows import CaseRows
from theory_lab.cases import Cases, evaluate
from theory_lab.engine import Engine, PieceTask, Task, TaskResult, merge, plan_tasks
from theory_lab.estimation import BlockSum, Cell, default_trials, sampler
from theory_lab.estimation.intervals import Interval, interval
from theory_lab.estimation.verdicts import VERDICTS, Decision, Decisions, Joined, Listed, Test, Verdict, settle
from theory_lab.settings import Budget, Progress, Settings
from theory_lab.studies import Finding, Piece
from theory_lab.worklist import Cells, Work, Worklist

if TYPE_CHECKING:
    import pandas as pd

    from theory_lab.store import Store


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
        cases: Cases,
        pieces: Sequence[Piece],
        store: Store | None,
        progress: Progress,
    ) -> None:
        self._settings = settings
        self._cases = cases
        self._pieces = pieces
        self._store = store
        self._progress = progress
        self._cells = Cells(cases, settings.seed)
        self._list = Worklist(self._cells)
        self._works = self._list.works
        self._findings: dict[Piece, tuple[tuple[Finding, ...], float]] = {}
        self._unsaved: list[Work] = []
        self._certain = {i: evaluate(cases[i]) for i in np.flatnonzero(self._cells.of_case < 0).tolist()}

    def load(self) -> None:
        """Set every cell's target and take what the store has."""
        asked = self._settings.trials
        targets = self._cells.map(default_trials) if asked is None else [asked] * len(self._cells)
        if self._store is None:
            for number, target in enumerate(targets):
                self._list.begin(number, target, [], 0.0)
            return
        self._load_cells(self._store, targets)
        for piece in self._pieces:
            found, damage = self._store.load_piece(piece, self._settings.seed)
            if damage:
                self._progress.say(f"{damage}; it is drawn again")
            if found is not None:
                self._findings[piece] = found, self._store.seconds(piece.digest(self._settings.seed))

    def _load_cells(self, store: Store, targets: Sequence[int]) -> None:
        names = self._cells.names
        # A sequential run looks at a cell at several sizes, and needs its blocks.
        whole = store.pooled_all(names, targets) if self._settings.budget is None else [None] * len(names)
        for number in self._list.found(targets, whole, store.seconds_all(names)):
            work = self._list.begin(number, targets[number], [], self._list.seconds[number])
            if store.holds(names[number]):
                work.blocks, damage = store.load(work.cell)
                if damage:
                    self._progress.say(f"{damage}; it is drawn again")

    def fixed(self, engine: Engine) -> None:
        """Draw every cell's trials."""
        tasks = self.tasks()
        total = len(self._cells) + len(self._pieces)
        left = {task.cell if isinstance(task, Task) else task.piece for task in tasks}
        self._progress.start(total, total - len(left), sum(task.seconds for task in tasks))
        self._draw(engine, tasks)

    def tasks(self) -> list[Task | PieceTask]:
        """What is missing of every cell's trials and of the pieces."""
        for work in self._works.values():
            work.blocks = _cut_blocks(work.blocks, work.cell, work.target)
        cells = [task for work in self._works.values() for task in plan_tasks(work.cell, work.target, work.blocks)]
        # Long pieces first: they cannot be cut, and would leave a worker alone at the end.
        return [*self._piece_tasks(), *cells]

    def counts(self) -> tuple[int, int]:
        """Cells and pieces, those that are finished included."""
        return len(self._cells), len(self._pieces)

    def take(self, results: Iterable[TaskResult]) -> None:
        """Take results that were drawn elsewhere; nothing is stored."""
        for result in results:
            if isinstance(result.task, Task):
                self._list.of(result.task.cell).add(result.blocks)

    def _piece_tasks(self) -> list[PieceTask]:
        missing = [piece for piece in self._pieces if piece not in self._findings]
        return [PieceTask(p, self._settings.seed) for p in sorted(missing, key=lambda p: -p.cost)]

    def sequential(self, engine: Engine, budget: Budget) -> None:
        """Double the trials of undecided cells until all are decided or the budget is spent."""
        deadline = time.monotonic() + budget.seconds
        cap = self._settings.trials or math.inf
        spent = 0
        # What the store has is dealt out as if drawn now, so that a resumed run looks at the same sizes.
        stored = {number: work.blocks for number, work in self._works.items()}
        for work in self._works.values():
            work.blocks = []
            first = sampler(work.cell).block_trials(work.cell)
            work.target = int(min(first, max(1, default_trials(work.cell) >> 4), cap))
        pieces = self._piece_tasks()
        # How much a sequential run will draw is not known; its cells are what can be counted.
        self._progress.start(len(self._works) + len(pieces), 0, float(len(self._works) + len(pieces)))
        self._draw(engine, pieces, deadline)
        active = list(self._works.items())
        while active and time.monotonic() < deadline:
            affordable = []
            for number, work in active:
                # The last step of a cell is what is left of the budget.
                step = int(min(work.target - work.trials, budget.trials - spent))
                if step > 0:
                    work.target = work.trials + step
                    spent += step
                    affordable.append((number, work))
            before = {number: work.blocks for number, work in affordable}
            tasks = []
            for number, work in affordable:
                work.blocks = _cut_blocks(merge(work.blocks, stored[number]), work.cell, work.target)
                tasks += plan_tasks(work.cell, work.target, work.blocks)
            self._draw(engine, tasks, deadline, count=False)
            for number, work in affordable:
                if work.trials > sum(block.trials for block in before[number]):
                    work.looks += 1
                else:  # cut short before anything new was complete
                    work.blocks = before[number]
            undecided = self._undecided_cells()
            left = [(i, w) for i, w in affordable if i in undecided and w.trials == w.target and w.target < cap]
            self._progress.advance(len(active) - len(left), float(len(active) - len(left)))
            for _, work in left:
                work.target = int(min(2 * work.target, cap))
            active = left

    def _draw(
        self, engine: Engine, tasks: Sequence[Task | PieceTask], deadline: float = math.inf, count: bool = True
    ) -> None:
        for task in tasks:
            if isinstance(task, Task):
                self._list.of(task.cell).pending += 1
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
        work = self._list.of(result.task.cell)
        work.add(result.blocks)
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

    def _undecided_cells(self) -> set[int]:
        """Numbers of the cells with a case that has no verdict yet."""
        every = np.arange(len(self._cases))
        findings = [finding for some, _ in self._findings.values() for finding in some]  # they share the error rate
        known = CaseRows(self._cases, self._list, self._certain, every)
        decisions = self._settle(known, findings)
        undecided = decisions.verdicts[: len(every)] == VERDICTS.index(Verdict.INCONCLUSIVE)
        return set(self._cells.of_case[undecided].tolist())

    def _settle(self, known: CaseRows, findings: Sequence[Finding]) -> Decisions:
        tests = Joined(known, Listed([self._finding_test(finding) for finding in findings]))
        return settle(tests, self._settings.alpha, self._settings.tolerance)

    def rows(self, finished_only: bool = False) -> pd.DataFrame:
        """One row a case and a finding; only those of finished cells if asked."""
        import pandas as pd

        from theory_lab.catalog import CATALOG

        chosen = np.arange(len(self._cases))
        if finished_only:
            done = np.append(self._list.finished(), True)  # and what has no cell
            chosen = chosen[done[self._cells.of_case]]
        found = [
            (piece, finding, seconds)
            for piece in self._pieces
            if piece in self._findings
            for findings, seconds in [self._findings[piece]]
            for finding in findings
        ]
        known = CaseRows(self._cases, self._list, self._certain, chosen)
        decisions = self._settle(known, [finding for _, finding, _ in found])
        size = len(chosen)
        columns = known.columns(decisions) | {name: [value] * size for name, value in self._common().items()}
        more = [
            self._finding_row(piece, finding, seconds, decision)
            for (piece, finding, seconds), decision in zip(found, decisions.listed(size), strict=True)
        ]
        if more or not size:
            columns = {
                name: [*_plain(columns.get(name, [])), *(row.get(name, math.nan) for row in more)] for name in COLUMNS
            }
        order = {name: index for index, name in enumerate(CATALOG)}
        places = np.array([order[name] for name in columns["claim"]], dtype=np.int64)
        if np.any(np.diff(places) < 0):
            by_claim = np.argsort(places, kind="stable")
            columns = {name: _picked(column, by_claim) for name, column in columns.items()}
        # With their types from the start: each column that is set or converted later costs as much as a small cell.
        for name in _FLOATS:
            columns[name] = np.array(columns[name], dtype=float)
        for name in ("length", "head_dim"):
            columns[name] = pd.array(columns[name], dtype="Int64")
        return pd.DataFrame({name: columns[name] for name in COLUMNS})

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
            "device": "cpu",
            "seconds": seconds,
            **self._common(),
        }

    def _common(self) -> dict[str, Any]:
        return {"seed": self._settings.seed, "version": __version__}


def _plain(column: Any) -> list[Any]:
    """A column as a list of numbers and texts."""
    return list(column.tolist() if isinstance(column, np.ndarray) else column)


def _picked(column: Any, rows: Any) -> Any:
    """Some rows of a column."""
    return column[rows] if isinstance(column, np.ndarray) else [column[row] for row in rows.tolist()]


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
