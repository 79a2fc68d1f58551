"""Constant thresholds by calibration: how much of a trained model's attention a threshold a head leaves out.

ETA's offline algorithm (arXiv 2609.20888): with a constant threshold for every head, keys whose score lies below it are
dropped and softmax runs over the others. A threshold is the largest one under which, on a calibration text, a head
loses at most a given share of its attention (its *pruned mass*); what is saved, and what it does to the loss, is
measured on held-out text by running the model so.

Scores are the logits, ``scale <q, k>``; the thresholds in (0, 1) of the paper belong to models trained with them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from theory_lab.attention.base import Scope
from theory_lab.errors import InputError, hint
from theory_lab.outside import read_json
from theory_lab.probes import texts
from theory_lab.probes.plan import DEFAULT_MODEL
from theory_lab.probes.texts import Text, Window
from theory_lab.pruning import Pruned, pruned_attention
from theory_lab.settings import Progress, Silent

if TYPE_CHECKING:
    import pandas as pd

    from theory_lab.models import LoadedModel

CRITERIA = ("mass", "loss")
_BINS = 4096
# Scores of a block of rows, over all heads.
_SCORES = 1 << 23
_LOSS_STEPS = 7


@dataclass(frozen=True)
class Calibration:
    """Thresholds of every head, and what they do on held-out text.

    Attributes
    ----------
    model : str
    criterion, target : str, float
        "mass": the largest pruned mass of a head on the calibration text; "loss": the relative rise of the loss there;
        "learned": the model's own thresholds, which have no target (NaN, as the budget and the pruned mass).
    budget : float
        The pruned mass a head that the thresholds were set for.
    thresholds : tuple of tuple of float
        By layer and head, in units of the logits; -inf where nothing may be dropped. Learned ones differ by row:
        means over the rows.
    pruned_mass : tuple of tuple of float
        On the calibration text, by layer and head: mean over rows of the weight below the threshold.
    length, block : int
        Tokens a window, and keys a block.
    calibration_texts, held_out_texts : tuple of str
    windows : int
        Windows of held-out text.
    loss, pruned_loss : float
        Nats a token on the held-out windows, of the model as it is and with hard pruning.
    change, change_low, change_high : float
        Relative change of the loss, 1 is a doubling, with a 95% interval: Student's t over the windows' own changes.
        NaN ends for one window.
    saved_keys, saved_blocks : float
        Share of the visible (query, key) pairs dropped, and of the visible (query, block) pairs without a survivor.
    dead_rows : float
        Share of rows without any survivor; their output is 0.
    density : dict of str to float
        Share of the keys kept by the rows that see n keys, for n a power of two: a decoding step at that length.
    block_density : dict of str to float
        The same for blocks.
    """

    model: str
    criterion: str
    target: float
    budget: float
    thresholds: tuple[tuple[float, ...], ...]
    pruned_mass: tuple[tuple[float, ...], ...]
    length: int
    block: int
    calibration_texts: tuple[str, ...]
    held_out_texts: tuple[str, ...]
    windows: int
    loss: float
    pruned_loss: float
    change: float
    change_low: float
    change_high: float
    saved_keys: float
    saved_blocks: float
    dead_rows: float
    saved_by_head: tuple[tuple[float, ...], ...] = field(repr=False)
    density: dict[str, float] = field(repr=False)
    block_density: dict[str, float] = field(repr=False)

    def to_json(self) -> str:
        """Everything, as JSON; -inf and NaN are null."""

        def plain(value: Any) -> Any:
            if isinstance(value, float):
                return value if math.isfinite(value) else None
            if isinstance(value, dict):
                return {name: plain(inner) for name, inner in value.items()}
            return [plain(inner) for inner in value] if isinstance(value, (tuple, list)) else value

        return json.dumps(plain(asdict(self)), indent=1) + "\n"

    def rows(self) -> pd.DataFrame:
        """One row a head: layer, head, threshold, pruned_mass (calibration text), saved_keys (held-out text)."""
        import pandas as pd

        found = [
            (layer, head, tau, self.pruned_mass[layer][head], self.saved_by_head[layer][head])
            for layer, heads in enumerate(self.thresholds)
            for head, tau in enumerate(heads)
        ]
        return pd.DataFrame(found, columns=["layer", "head", "threshold", "pruned_mass", "saved_keys"])


def read_thresholds(path: str | Path) -> torch.Tensor:
    """Thresholds (layers, heads) of a file that :meth:`Calibration.to_json` made.

    Raises
    ------
    InputError
        No such file, or one of another kind.
    """
    try:
        found = read_json(Path(path))["thresholds"]
        made = torch.tensor([[-math.inf if tau is None else float(tau) for tau in heads] for heads in found])
        if made.ndim != 2 or not made.numel() or bool(made.isnan().any()):
            raise ValueError
        return made
    except OSError as error:
        raise InputError("thresholds", str(path), f"a readable file ({error.strerror or error})") from None
    except (ValueError, LookupError, TypeError, OverflowError):
        raise InputError("thresholds", str(path), "a file that theory-lab calibrate --out has written") from None


def calibrate_thresholds(
    model: str | Path | LoadedModel = DEFAULT_MODEL,
    text: str | Text | Sequence[str | Text] | None = None,
    target: float = 0.01,
    *,
    criterion: str = "mass",
    held_out: str | Text | Sequence[str | Text] | None = None,
    length: int = 1024,
    windows: int = 1,
    block: int = 64,
    seed: int = 0,
    device: str = "cpu",
    dtype: str = "float32",
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Calibration:
    """Set a constant threshold for every head on one text, and measure what it saves and costs on another.

    Parameters
    ----------
    model : str, path or LoadedModel
        A decoder whose attention goes through transformers' interface, without windows, caps, sinks or biases.
    text : str, Text or a sequence of them, optional
        To calibrate on; strings are texts themselves. Default: the first three shipped texts.
    target : float
        In (0, 1). With the criterion "mass" the largest share of its attention that a head may lose on average over the
        rows of the calibration text; with "loss" the largest relative rise of the loss there, for which the mass that
        all heads may lose is searched.
    criterion : str
        "mass" or "loss".
    held_out : str, Text or a sequence of them, optional
        To measure on. Default: the shipped texts that `text` does not contain.
    length, windows : int
        Tokens a window, and windows a text.
    block : int
        Keys a block: what a decoding kernel reads or skips as a whole.
    seed : int
        Of the places of the windows.
    device, dtype, trust_remote_code
        As for :func:`theory_lab.models.load_model`.
    progress : Progress, optional

    Returns
    -------
    Calibration

    Raises
    ------
    InputError
        An argument out of range, a text too short, a model that cannot be pruned so, or no held-out text.
    """
    from theory_lab.models import load_model

    if not 0.0 < target < 1.0:
        raise InputError("target", target, "a number above 0 and below 1")
    if criterion not in CRITERIA:
        raise InputError("criterion", criterion, f"{hint(str(criterion), CRITERIA)}one of {', '.join(CRITERIA)}")
    for name, value, least in (("length", length, 2), ("windows", windows, 1), ("block", block, 1)):
        if value < least:
            raise InputError(name, value, f"at least {least}")
    shipped = texts.shipped()
    chosen = _as_texts(text) if text is not None else list(shipped[:3])
    used = {each.digest for each in chosen}
    others = _as_texts(held_out) if held_out is not None else [each for each in shipped if each.digest not in used]
    if any(each.digest in used for each in others):
        raise InputError("held-out", others[0].name, "a text that is not calibrated on")
    if isinstance(model, (str, Path)):
        model = load_model(model, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    loaded = model
    if not loaded.causal or loaded.tokenizer is None:
        raise InputError("model", loaded.name, "a decoder with a tokenizer: its loss is that of the next token")
    if loaded.max_positions is not None and length > loaded.max_positions:
        raise InputError("length", length, f"at most {loaded.max_positions}, the positions of the model")
    run = _Run(loaded, length, windows, seed, block, progress or Silent())
    return run.all(chosen, others, target, criterion)


def measure_learned(
    model: str | Path | LoadedModel,
    text: str | Text | Sequence[str | Text] | None = None,
    *,
    prune: str = "renormalize",
    length: int = 512,
    windows: int = 1,
    block: int = 64,
    seed: int = 0,
    device: str = "cpu",
    dtype: str = "float32",
    progress: Progress | None = None,
) -> Calibration:
    """What hard pruning at the thresholds that a model has learned saves and costs.

    Parameters
    ----------
    model : str, path or LoadedModel
        A model whose layers attend by ETA (:mod:`theory_lab.models.lab`).
    text : str, Text or a sequence of them, optional
        To measure on. Default: the shipped texts.
    prune : str
        What the weights of survivors are: "drop", "renormalize" or "exact"; see :mod:`theory_lab.attention.eta`.
    length, windows, block, seed, device, dtype, progress
        As for :func:`calibrate_thresholds`.

    Raises
    ------
    InputError
        An argument out of range, a text too short, or a model without learned thresholds.
    """
    from theory_lab.attention.eta import PRUNINGS, ETALogit, ETAWeight
    from theory_lab.models import load_model
    from theory_lab.probes.watching import find_attention, watch

    if prune not in PRUNINGS:
        raise InputError("prune", prune, f"one of {', '.join(PRUNINGS)}")
    loaded = load_model(model, device=device, dtype=dtype) if isinstance(model, (str, Path)) else model
    found = {layer: getattr(module, "mechanism", None) for layer, (_, module) in find_attention(loaded.model).items()}
    mechanisms = {layer: m for layer, m in found.items() if isinstance(m, (ETALogit, ETAWeight))}
    if not mechanisms or len(mechanisms) < len(found):
        raise InputError("model", loaded.name, "a model whose layers all attend by ETA: its thresholds are measured")
    chosen = _as_texts(text) if text is not None else list(texts.shipped())
    run = _Run(loaded, length, windows, seed, block, progress or Silent())
    means: dict[int, list[torch.Tensor]] = {}
    seen = Pruned(block)

    def count(call: Any) -> None:
        q = call.q.float()
        scope = Scope(torch.empty(0), torch.empty(0), True, q.shape[-1], None, q)
        tau = mechanisms[call.layer].thresholds(scope, q)[0, ..., 0].detach()
        means.setdefault(call.layer, []).append(tau.mean(-1))
        seen.add(call.layer, q, call.k, tau, call.scale)

    before = {layer: m.prune for layer, m in mechanisms.items()}
    windows_ = run.cut(chosen)
    run.start(2 * len(windows_))
    try:
        plain = np.array([run.loss(window) for window in windows_])
        for m in mechanisms.values():
            m.prune = prune
        with watch(loaded.model, count):
            pruned = np.array([run.loss(window) for window in windows_])
    finally:
        for layer, m in mechanisms.items():
            m.prune = before[layer]
        run.stop()
    tau = torch.stack([torch.stack(means[layer]).mean(0) for layer in sorted(means)])
    none = torch.full_like(tau, math.nan)
    return run.result("learned", math.nan, math.nan, tau, none, (), chosen, plain, pruned, seen)


def _as_texts(given: str | Text | Sequence[str | Text]) -> list[Text]:
    many = [given] if isinstance(given, (str, Text)) else list(given)
    if not many:
        raise InputError("text", "none", "at least one text")
    return [each if isinstance(each, Text) else texts.as_text(f"text {i}", each) for i, each in enumerate(many, 1)]


class _Run:
    """A calibration: windows, passes, and progress."""

    def __init__(
        self, loaded: LoadedModel, length: int, windows: int, seed: int, block: int, progress: Progress
    ) -> None:
        self._loaded, self._length, self._windows, self._seed = loaded, length, windows, seed
        self._block, self._progress = block, progress

    def all(self, chosen: list[Text], others: list[Text], target: float, criterion: str) -> Calibration:
        first, second = self.cut(chosen), self.cut(others)
        search = _LOSS_STEPS * len(first) + len(first) if criterion == "loss" else 0
        self.start(len(first) + search + 2 * len(second))
        try:
            masses = self._masses(first)
            budget = target if criterion == "mass" else self._budget(masses, first, target)
            tau, lost = masses.thresholds(budget)
            plain = np.array([self.loss(window) for window in second])
            seen = Pruned(self._block)
            with pruned_attention(self._loaded.model, tau, seen):
                pruned = np.array([self.loss(window) for window in second])
        finally:
            self.stop()
        names = tuple(each.name for each in chosen)
        return self.result(criterion, target, budget, tau, lost, names, others, plain, pruned, seen)

    def start(self, passes: int) -> None:
        """Say how many passes there will be."""
        self._progress.start(passes, 0, float(passes))

    def stop(self) -> None:
        """Say that there are no more."""
        self._progress.stop()

    def result(
        self,
        criterion: str,
        target: float,
        budget: float,
        tau: torch.Tensor,
        lost: torch.Tensor,
        names: tuple[str, ...],
        others: list[Text],
        plain: np.ndarray[Any, Any],
        pruned: np.ndarray[Any, Any],
        seen: Pruned,
    ) -> Calibration:
        """What was measured, with its interval."""
        low, high = _interval(pruned / plain - 1.0)
        density, blocks = seen.by_length()
        return Calibration(
            self._loaded.name, criterion, target, budget, _tuples(tau), _tuples(lost), self._length, self._block,
            names, tuple(each.name for each in others), len(plain), float(plain.mean()),
            float(pruned.mean()), float((pruned / plain).mean() - 1.0), low, high, seen.saved_keys, seen.saved_blocks,
            seen.dead_rows, _tuples(seen.saved_by_head), density, blocks,
        )  # fmt: skip

    def cut(self, sources: list[Text]) -> list[Window]:
        special = texts.special_tokens(self._loaded.tokenizer)
        found = []
        for source in sources:
            ids = texts.tokenize(self._loaded.tokenizer, source)
            found += texts.cut(source, ids, self._length, self._windows, self._seed, special)
        return found

    def loss(self, window: Window) -> float:
        """Nats a token of one window."""
        ids = torch.tensor([window.ids], device=self._loaded.model.device)
        with torch.no_grad():
            logits = self._loaded.model(input_ids=ids, use_cache=False).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits.float(), ids[0, 1:])
        self._progress.advance(1, 1.0)
        return float(loss)

    def _masses(self, windows: list[Window]) -> _Masses:
        from theory_lab.probes.running import run_backbone
        from theory_lab.probes.watching import watch

        masses = _Masses()
        with watch(self._loaded.model, masses) as seen:
            for window in windows:
                with torch.no_grad():
                    run_backbone(self._loaded, window.ids)
                seen.check()
                self._progress.advance(1, 1.0)
        return masses

    def _budget(self, masses: _Masses, windows: list[Window], target: float) -> float:
        """The largest pruned mass, on a logarithmic scale, at which the loss rises by at most the target."""
        plain = np.mean([self.loss(window) for window in windows])
        low, high = math.log(1e-5), math.log(0.9)
        for _ in range(_LOSS_STEPS):
            middle = (low + high) / 2.0
            with pruned_attention(self._loaded.model, masses.thresholds(math.exp(middle))[0], None):
                change = np.mean([self.loss(window) for window in windows]) / plain - 1.0
            low, high = (middle, high) if change <= target else (low, middle)
        return math.exp(low)


def _tuples(values: torch.Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in values.double().tolist())


def _interval(changes: np.ndarray[Any, Any]) -> tuple[float, float]:
    """95% interval of the mean by Student's t; NaN ends for fewer than two."""
    from scipy import stats

    n = len(changes)
    if n < 2:
        return math.nan, math.nan
    half = float(stats.t.ppf(0.975, n - 1) * changes.std(ddof=1) / math.sqrt(n))
    return float(changes.mean()) - half, float(changes.mean()) + half


class _Masses:
    """Attention by score, head by head: histograms of the weight of keys, over the rows of all calls."""

    def __init__(self) -> None:
        self._lows: dict[int, torch.Tensor] = {}
        self._widths: dict[int, torch.Tensor] = {}
        self._mass: dict[int, torch.Tensor] = {}
        self._rows: dict[int, int] = {}

    def __call__(self, call: Any) -> None:
        """Observe a call of :func:`theory_lab.probes.watching.watch`."""
        if call.softcap is not None or call.sinks is not None or call.window is not None or call.mask is not None:
            raise InputError("model", call.name, "attention without windows, caps, sinks or biases")
        if call.own is not None:  # pruning would put softmax in its place
            raise InputError(
                "model", call.name, f"softmax attention; this layer's is {type(call.own.mechanism).__name__}"
            )
        heads, rows = call.q.shape[1], call.q.shape[2]
        height = max(1, _SCORES // (heads * call.k.shape[2]))
        for first in range(0, rows, height):
            scores, seen = _scores(call, first, min(first + height, rows))
            self._add(call.layer, scores, seen)
        self._rows[call.layer] = self._rows.get(call.layer, 0) + rows

    def _add(self, layer: int, scores: torch.Tensor, seen: torch.Tensor) -> None:
        weights = torch.softmax(scores.masked_fill(~seen, -math.inf), -1)
        if layer not in self._lows:
            low = scores.masked_fill(~seen, math.inf).amin((1, 2)).double()
            high = scores.masked_fill(~seen, -math.inf).amax((1, 2)).double()
            # Later rows may score lower or higher: what lies outside is counted at the ends, and stays.
            self._lows[layer] = low - 0.5 * (high - low)
            self._widths[layer] = ((high - low) * 2.0 / _BINS).clamp(min=1e-6)
            self._mass[layer] = torch.zeros(scores.shape[0], _BINS, dtype=torch.float64, device=scores.device)
        place = (scores.double() - self._lows[layer][:, None, None]) / self._widths[layer][:, None, None]
        place = (
            place.clamp(0, _BINS - 1).long() + _BINS * torch.arange(len(scores), device=scores.device)[:, None, None]
        )
        mass = torch.bincount(place[seen], weights=weights[seen].double(), minlength=_BINS * len(scores))
        self._mass[layer] += mass.view(-1, _BINS)

    def thresholds(self, budget: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The highest thresholds (layers, heads) below which at most `budget` of a row lies on average; that mass."""
        found, lost = [], []
        for layer in sorted(self._mass):
            below = self._mass[layer].cumsum(-1) / self._rows[layer]
            count = (below <= budget).sum(-1)
            edge = self._lows[layer] + self._widths[layer] * count
            found.append(torch.where(count > 0, edge, -math.inf))
            lost.append(torch.where(count > 0, below.gather(-1, (count - 1).clamp(min=0)[:, None])[:, 0], 0.0))
        return torch.stack(found).cpu(), torch.stack(lost).cpu()


def _scores(call: Any, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (H, rows, S) of some rows of a call, in float32, and which of them are visible."""
    q = call.q[0, :, first:stop].float()
    k = call.k[0].float().repeat_interleave(call.q.shape[1] // call.k.shape[1], 0)
    scores = call.scale * (q @ k.transpose(-1, -2))
    row = torch.arange(first, stop, device=q.device)[:, None] + int(call.query_offset)
    seen = torch.arange(k.shape[1], device=q.device)[None, :] <= row
    return scores, seen.expand_as(scores)
