"""How often a run's model was right: the share of one task's answers, by length, with its interval.

Figures of a plan name such a share by ``accuracy``, of questions, or ``sequence_accuracy``, of sequences whose answers
are all right; a run with several tasks names one: ``sequence_accuracy(multi-needle:needles=2)@4000``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from theory_lab.errors import InputError

#: A share -> the columns of its value and of the ends of its interval, in the rows of ``theory_lab.tasks.evaluate``.
_COLUMNS = {
    "accuracy": ("accuracy", "low", "high"),
    "sequence_accuracy": ("sequence_accuracy", "sequence_low", "sequence_high"),
}
_WORDS = re.compile(rf"({'|'.join(_COLUMNS)})(?:\((.+)\))?(?:@(\d+))?")


class Asked(NamedTuple):
    """What a figure asks for.

    Attributes
    ----------
    share : str
        ``accuracy`` or ``sequence_accuracy``.
    task : str or None
        As the plan measures it; None where it measures one alone.
    length : float or None
        Tokens; None for every length.
    """

    share: str
    task: str | None
    length: float | None


class Share(NamedTuple):
    """A share of right answers with the ends of its 95% interval over the texts of one model, all in percent."""

    value: float
    low: float
    high: float


def parse(what: str) -> Asked | None:
    """What the words ask for; None if it is no share of answers."""
    found = _WORDS.fullmatch(what)
    return None if found is None else Asked(found[1], found[2], None if found[3] is None else float(found[3]))


def shares(result: Mapping[str, Any], asked: Asked) -> dict[float, Share]:
    """A run's shares by length.

    Raises
    ------
    InputError
        If its model took several tests and none of them is named.
    """
    rows = result["measured"].get("tasks", [])
    names = list(dict.fromkeys(row.get("asked") for row in rows))
    if asked.task is None and len(names) > 1:
        allowed = f"one of several tasks is named, as in {asked.share}({names[0]}); there are {', '.join(names)}"
        raise InputError("figures", asked.share, allowed)
    found = {}
    for row in rows:
        length = float(row["length"])
        if asked.task in (None, row.get("asked")) and asked.length in (None, length):
            value, low, high = (100.0 * float(row.get(name, math.nan)) for name in _COLUMNS[asked.share])
            found[length] = Share(value, low, high)
    return found


def interval(values: Sequence[float], own: Sequence[Share], student: tuple[float, float]) -> tuple[float, float]:
    """The ends for a mean share over seeds, in percent.

    Parameters
    ----------
    values : sequence of float
        One a seed.
    own : sequence of Share
        The same with their own intervals.
    student : tuple of float
        Student's ends over the seeds; NaN for one seed.

    Returns
    -------
    low, high : float
        For one seed those of its model, over its texts. For several the wider of Student's and the mean of the models'
        own: where every seed is right in every text, seeds do not differ, and more texts still might show a failure.
    """
    low = sum(share.low for share in own) / len(own)
    high = sum(share.high for share in own) / len(own)
    if len(values) > 1:
        low, high = min(low, student[0]), max(high, student[1])
    return max(low, 0.0), min(high, 100.0)
