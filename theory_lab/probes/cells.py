"""The forward passes of a probe: which window, and which lengths are read off it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from theory_lab.models.conversion import hushed
from theory_lab.probes import texts
from theory_lab.probes.positions import depends_on_length
from theory_lab.probes.texts import Text, Window

if TYPE_CHECKING:
    from theory_lab.models import LoadedModel
    from theory_lab.probes.plan import Plan


@dataclass(frozen=True)
class Cell:
    """One forward pass: a window, and the lengths that are read off it."""

    window: Window
    lengths: tuple[int, ...]


def cells_of(loaded: LoadedModel, plan: Plan, sources: Sequence[Text]) -> list[Cell]:
    """The forward passes that a plan needs; InputError if a text is too short for one."""
    # transformers warns of texts beyond the model's positions; we cut windows of them.
    with hushed():
        return list(_cells(loaded, plan, sources))


def _cells(loaded: LoadedModel, plan: Plan, sources: Sequence[Text]) -> Iterator[Cell]:
    special = texts.special_tokens(loaded.tokenizer)
    # What follows a text (an encoder's [SEP]) must follow every shorter one too.
    nested = loaded.causal and not special[1] and not depends_on_length(loaded.model)
    tokens = [texts.tokenize(loaded.tokenizer, text) for text in sources]
    runs = [plan.lengths] if nested else [(length,) for length in plan.lengths]
    for lengths in runs:
        for text, ids in zip(sources, tokens, strict=True):
            for window in texts.cut(text, ids, lengths[-1], plan.windows, plan.seed, special):
                yield Cell(window, lengths)


def work_of(cell: Cell) -> float:
    """Rough cost of a cell: dense layers by token, attention by pair."""
    length = cell.lengths[-1]
    return length * (1.0 + length / 2000.0)
