"""The kinds of experiments (what computes them) and of drawings (what shows them), as data.

Both name their function by module, which is imported when it is called: listing the experiments stays cheap.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theory_lab.reproduce.needs import Need, no_need

if TYPE_CHECKING:
    from theory_lab.reproduce.spec import Experiment

_CHECK = ("theory_lab.runner", "theory_lab.cases", "theory_lab.claims", "theory_lab.estimation", "theory_lab.noise")


_PROBE = ("theory_kernels.statistics",)


def _check_code(settings: Mapping[str, Any]) -> tuple[str, ...]:
    papers = {claim.split("-")[0] for claim in settings["claims"]}
    real = any(name.startswith("model:") for name in settings.get("noise", ()))
    extra = ("theory_lab.noise.model_scores",) if real else ()
    return (*_CHECK, *extra, *(f"theory_lab.studies.{'tda' if paper == 'tra' else paper}" for paper in sorted(papers)))


def _lazy(target: str) -> Callable[..., Any]:
    """A function that is imported when it is called."""
    return lambda *arguments: _load(target)(*arguments)


def _attention_code(settings: Mapping[str, Any]) -> tuple[str, ...]:
    folder = Path(__file__).resolve().parent.parent / "attention"
    names = {path.stem for path in folder.glob("[a-z]*.py")} - {"fast"}  # pictures are drawn from plain weights
    return tuple(f"theory_lab.attention.{name}" for name in sorted(names))


def _kind(name: str) -> Kind:
    return KINDS[name]


@dataclass(frozen=True)
class Kind:
    """What computes an experiment.

    Attributes
    ----------
    name : str
        As the files call it.
    function : str
        ``module:name`` of (experiment, settings, context) -> DataFrame.
    fields : mapping of key to type
        What ``[settings]`` and ``[quick]`` may hold; types are those of ``document.READERS``.
    required : tuple of str
        Keys that must be there.
    drawings : tuple of str
        What can show its rows.
    code : callable
        settings -> modules beside the function's own whose code its numbers depend on.
    need : callable
        (experiment, settings, data folder) -> what this machine lacks to compute it, or None.
    needs_paper : bool
        Whether a table of this kind makes sense only beside the paper's.
    inputs : callable
        (experiment, data folder) -> a digest of the files that it reads; empty if it reads none.
    """

    name: str
    function: str
    fields: Mapping[str, str]
    required: tuple[str, ...]
    drawings: tuple[str, ...]
    code: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda settings: ()
    need: Callable[[Experiment, Mapping[str, Any], str], Need | None] = no_need
    needs_paper: bool = False
    inputs: Callable[[Experiment, str], str] = lambda experiment, data: ""

    def __reduce__(self) -> tuple[Callable[[str], Kind], tuple[str]]:
        # An experiment crosses to a process that draws; its kind is there already.
        return _kind, (self.name,)

    def modules(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Modules whose code its numbers depend on."""
        return (self.function.partition(":")[0], *self.code(settings))

    def load(self) -> Callable[..., Any]:
        """The function."""
        return _load(self.function)


@dataclass(frozen=True)
class Drawing:
    """What shows the rows: ``function`` is ``module:name`` of (frame, experiment) -> Figure; tables have none."""

    name: str
    function: str
    fields: Mapping[str, str] = field(default_factory=dict)

    def modules(self) -> tuple[str, ...]:
        """Modules whose code its look depends on."""
        own = ("theory_lab.reproduce.latex",) if self.name == "table" else ()
        return (self.function.partition(":")[0], *own, "theory_lab.figures.style")

    def load(self) -> Callable[..., Any]:
        """The function."""
        return _load(self.function)


def _load(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


_GRIDS = {
    "length": "wholes", "kappa": "numbers", "beta": "numbers", "sigma": "numbers", "rho": "numbers",
    "key_rho": "numbers", "lambda": "numbers", "head_dim": "wholes",
}  # fmt: skip

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            "check",
            "theory_lab.reproduce.compute.check:compute",
            {
                "claims": "texts", "noise": "texts", **_GRIDS, "trials": "whole", "estimator": "text",
                "alpha": "number", "tolerance": "number", "bound_scale": "number",
            },
            ("claims",),
            ("bounds", "ratio"),
            code=_check_code,
        ),
        Kind(
            "phase",
            "theory_lab.reproduce.compute.phase:compute",
            {"laws": "texts", "scales": "numbers", "lengths": "wholes", "mechanisms": "texts", "rows": "whole"},
            (),
            ("phase",),
        ),
        Kind(
            "mechanisms",
            "theory_lab.reproduce.compute.mechanisms:compute",
            {
                "laws": "texts", "lengths": "wholes", "mechanisms": "texts", "rows": "whole", "scale": "number",
                "planted": "number",
            },
            ("laws", "lengths"),
            ("mechanisms",),
            code=_attention_code,
        ),
        Kind(
            "features",
            "theory_lab.reproduce.compute.features:compute",
            {"mechanisms": "texts", "rows": "texts"},
            ("mechanisms", "rows"),
            ("features", "table"),
            code=_attention_code,
        ),
        Kind(
            "threshold",
            "theory_lab.reproduce.compute.threshold:compute",
            {"noise": "texts", "length": "wholes", "head_dim": "wholes", "trials": "whole"},
            (),
            ("threshold",),
            code=lambda settings: (*_CHECK, "theory_lab.studies.ours"),
        ),
        Kind(
            "benchmark",
            "theory_lab.reproduce.compute.benchmark:compute",
            {"results": "text", "peer": "text", "mechanisms": "texts", "directions": "texts", "case": "text"},
            ("results", "peer", "mechanisms", "directions"),
            ("speed", "table"),
            need=_lazy("theory_lab.reproduce.compute.benchmark:need"),
            inputs=_lazy("theory_lab.reproduce.compute.benchmark:inputs"),
        ),
        Kind(
            "probe",
            "theory_lab.reproduce.compute.probe:compute",
            {
                "model": "text", "lengths": "wholes", "as": "texts", "measures": "texts", "by_layer": "flag",
                "windows": "whole", "layers": "wholes",
            },
            ("model", "lengths", "as", "measures"),
            ("probe",),
            code=lambda settings: (*_PROBE, "theory_lab.probes.probing"),
            need=_lazy("theory_lab.reproduce.compute.probe:need"),
        ),
        Kind(
            "tails",
            "theory_lab.reproduce.compute.tails:compute",
            {"model": "text", "tokens": "whole", "lengths": "wholes"},
            ("model", "tokens", "lengths"),
            ("tails",),
            code=lambda settings: (*_PROBE, "theory_lab.probes.unrelated"),
            need=_lazy("theory_lab.reproduce.compute.tails:need"),
        ),
        Kind(
            "overview",
            "theory_lab.reproduce.compute.overview:compute",
            {"model": "text", "lengths": "wholes", "as": "texts", "windows": "whole", "layers": "wholes"},
            ("model", "lengths"),
            ("overview",),
            code=lambda settings: (*_PROBE, "theory_lab.probes.probing"),
            need=_lazy("theory_lab.reproduce.compute.overview:need"),
        ),
        Kind(
            "unrelated",
            "theory_lab.reproduce.compute.overview:compute_unrelated",
            {"model": "text", "tokens": "whole"},
            ("model", "tokens"),
            ("unrelated",),
            code=lambda settings: (*_PROBE, "theory_lab.probes.unrelated"),
            need=_lazy("theory_lab.reproduce.compute.overview:need"),
        ),
        Kind(
            "costs",
            "theory_lab.reproduce.compute.costs:compute",
            {"dtype": "text", "heads": "whole", "bytes": "whole"},
            ("dtype", "heads", "bytes"),
            ("curves",),
            need=_lazy("theory_lab.reproduce.compute.costs:need"),
            inputs=_lazy("theory_lab.reproduce.compute.costs:inputs"),
        ),
        Kind(
            "record",
            "theory_lab.reproduce.compute.record:compute",
            {"shape": "text"},
            (),
            ("table", "curves", "map"),
            need=_lazy("theory_lab.reproduce.compute.record:need"),
            inputs=_lazy("theory_lab.reproduce.compute.record:inputs"),
        ),
    )
}  # fmt: skip

_COMMON = {"width": "text", "height": "number", "font": "text"}
_AXES = {"xlabel": "text", "ylabel": "text", "xlog": "flag", "ylog": "flag", "zero": "flag"}

DRAWINGS: dict[str, Drawing] = {
    drawing.name: drawing
    for drawing in (
        Drawing("bounds", "theory_lab.figures.check_plot:draw_check", _COMMON),
        Drawing(
            "ratio",
            "theory_lab.figures.ratio_plot:draw_ratio",
            {**_COMMON, "by": "text", "ylabel": "text", "bound": "text", "floor": "number"},
        ),
        Drawing("phase", "theory_lab.figures.phase_plot:draw_phase", _COMMON),
        Drawing(
            "mechanisms",
            "theory_lab.figures.mechanisms_plot:draw_mechanisms",
            {**_COMMON, "statistic": "text", "families": "flag"},
        ),
        Drawing("features", "theory_lab.figures.features_plot:draw_features", _COMMON),
        Drawing("threshold", "theory_lab.figures.threshold_plot:draw_threshold", _COMMON),
        Drawing("speed", "theory_lab.figures.speed_plot:draw_speed", _COMMON),
        Drawing("probe", "theory_lab.figures.curves_plot:draw_probe", {**_COMMON, **_AXES}),
        Drawing("tails", "theory_lab.figures.tails_plot:draw_tails", _COMMON),
        Drawing("overview", "theory_lab.figures.probe_plot:draw_overview", _COMMON),
        Drawing("unrelated", "theory_lab.figures.unrelated_plot:draw_unrelated", _COMMON),
        Drawing(
            "curves",
            "theory_lab.figures.curves_plot:draw_curves",
            {**_COMMON, **_AXES, "level": "text", "own_scales": "flag"},
        ),
        Drawing(
            "map",
            "theory_lab.figures.map_plot:draw_map",
            {**_COMMON, "xlabel": "text", "ylabel": "text", "rowlabel": "text"},
        ),
        Drawing("table", "theory_lab.reproduce.tables:render"),
    )
}
