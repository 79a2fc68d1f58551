"""What a probe is asked, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from theory_lab.probes.summary import summarize
from theory_lab.probes.whatif import Mechanism

if TYPE_CHECKING:
    import pandas as pd

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_LENGTHS = (64, 128, 256, 512, 1024, 2048)
NEAR_ZERO = (1e-6, 1e-3)
SINK_EPS = 0.3


@dataclass(frozen=True)
class Plan:
    """What to measure, apart from the model and the texts."""

    lengths: tuple[int, ...]
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    groups: tuple[str, ...]
    mechanism: Mechanism
    windows: int
    seed: int
    near_zero: tuple[float, ...] = NEAR_ZERO
    sink_keys: tuple[int, ...] = (1,)
    sink_eps: float = SINK_EPS


@dataclass(frozen=True)
class ProbeResult:
    """What a probe measured.

    Attributes
    ----------
    rows : DataFrame
        One row a (text, window, length, layer, head): the measures of one head on one sequence.
    plan : Plan
    model : str
    unseen : tuple of str
        Layers whose attention could not be watched, by name.
    notes : tuple of str
        What the reader should know: warnings, and what was cut short.
    complete : bool
        Whether everything asked for was measured.
    """

    rows: pd.DataFrame
    plan: Plan
    model: str
    unseen: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    complete: bool = True
    _summaries: dict[bool, pd.DataFrame] = field(default_factory=dict, repr=False, compare=False)

    def summary(self, *, by_layer: bool = False) -> pd.DataFrame:
        """Averages over heads, layers and windows with intervals over texts; see :func:`summarize`."""
        if by_layer not in self._summaries:
            eps, seed = self.plan.sink_eps, self.plan.seed
            self._summaries[by_layer] = summarize(self.rows, by_layer=by_layer, sink_eps=eps, seed=seed)
        return self._summaries[by_layer].copy()

    def plot(self, path: str) -> list[str]:
        """Draw the pictures into a folder, or one of them into a file; see ``theory_lab.figures.probe_plot``."""
        from theory_lab.figures.probe_plot import plot_probe

        return plot_probe(self, path)
