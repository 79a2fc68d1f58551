"""What the pictures of a probe show, as three tables: of the model, of its layers, of its heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from theory_lab.probes.plan import ProbeResult

#: Measures that may be shown head by head, their titles and the limits of their colors; the first that say something.
HEATS = (
    ("g_sink_ratio_1", "gSinkRatio(1)", (0.0, 1.0)),
    ("normalized_entropy", "entropy / log n", (0.0, 1.0)),
    ("sparsity", "exact zeros", (0.0, 1.0)),
    ("near_zero_0.001", "weights below 0.001", (0.0, 1.0)),
)
Heat = tuple[str, str, tuple[float, float]]


@dataclass(frozen=True)
class ProbeTables:
    """A probe's averages.

    Attributes
    ----------
    model : DataFrame
        length, measure, estimate, ci_low, ci_high: over all heads, with intervals over texts.
    layers : DataFrame
        And layer: over the heads of each.
    heads : DataFrame
        layer, head, measure, estimate at the longest length, over texts; NaN for a dead head.
    """

    model: pd.DataFrame
    layers: pd.DataFrame
    heads: pd.DataFrame

    @classmethod
    def of(cls, result: ProbeResult) -> ProbeTables:
        """The tables of a probe."""
        import pandas as pd

        rows = result.rows
        longest = rows[rows.length == rows.length.max()].groupby(["layer", "head"])
        shown = [name for name, _, _ in HEATS if name in rows]
        heads = [longest[name].mean().reset_index(name="estimate").assign(measure=name) for name in shown]
        return cls(result.summary(), result.summary(by_layer=True), pd.concat(heads) if heads else pd.DataFrame())

    @classmethod
    def from_frame(cls, frame: pd.DataFrame) -> ProbeTables:
        """What :meth:`frame` made."""
        whole = frame.layer.isna()
        table = frame.assign(layer=frame.layer.fillna(-1).astype(int))
        return cls(table[whole], table[~whole & frame["head"].isna()], table[frame["head"].notna()])

    def frame(self, measures: Sequence[str]) -> pd.DataFrame:
        """One table of some measures: layer and head are empty where there is an average over them."""
        import pandas as pd

        columns = ["length", "layer", "head", "measure", "estimate", "ci_low", "ci_high", "texts"]
        heads = self.heads.assign(length=self.longest)
        table = pd.concat([part.reindex(columns=columns) for part in (self.model, self.layers, heads)])
        return table[table.measure.isin(measures)].reset_index(drop=True)

    @property
    def longest(self) -> int:
        """The longest length."""
        return int(self.model.length.max())

    @property
    def has_sinks(self) -> bool:
        """Whether the first token's share was measured."""
        return bool(self.measure("g_sink_ratio_1").estimate.notna().any())

    def measure(self, name: str, by_layer: bool = False) -> pd.DataFrame:
        """One measure of the model or of its layers, by length."""
        table = self.layers if by_layer else self.model
        return table[table.measure == name].sort_values("length")

    def zeros(self) -> list[str]:
        """Measures of zeros that say something: exact ones if there are any, near ones else."""
        found = set(self.layers.measure)
        exact = [name for name in ("sparsity", "sparsity_1", "sparsity_2") if name in found]
        if any((self.layers[self.layers.measure == name].estimate > 0).any() for name in exact):
            return exact
        return sorted((m for m in found if m.startswith("near_zero_") and m[-2:] not in ("_1", "_2")), reverse=True)

    def heats(self, most: int) -> list[Heat]:
        """The first measures that are worth a map of heads: known for some, and not 0 for all."""
        found = []
        for heat in HEATS:
            values = self.heads[self.heads.measure == heat[0]].estimate if len(self.heads) else self.heads
            if len(values) and values.notna().any() and not (values.fillna(0) == 0).all():
                found.append(heat)
        return found[:most]
