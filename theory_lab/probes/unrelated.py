"""Scores of unrelated tokens in a trained model, held against what TDA's theory assumes of them.

Assumption 4.1 says that a spurious key's score (a cosine) is noise: mean 0, sub-Gaussian with variance proxy sigma^2/d.
Which keys are spurious, no model says. Here a key counts as unrelated if it comes from another text: queries of one
text meet the keys that another text left at the same layer, at the positions where both stand (so rotary codes
enter as they do in use), key before query. What they still share is the language: the same word may stand in both, and
every text has a first token that heads use as a sink, which is left out on both sides.

The proxy is that of the scores about their mean, max over t of 2 log E exp(t (X - E X)) / t^2 on a grid of t that
includes its limit at 0, the variance. A mean other than 0 is no part of it and is reported beside it: it breaks the
assumption on its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from theory_lab.errors import InputError
from theory_lab.probes import measures, texts
from theory_lab.probes.bootstrap import ends, resample
from theory_lab.probes.measures import F64
from theory_lab.probes.plan import DEFAULT_MODEL
from theory_lab.probes.texts import Text
from theory_lab.probes.whatif import PLACES, Mechanism, parse_mechanism
from theory_lab.settings import Progress, Silent
from theory_lab.streams import Stream, cell_digest, validate_seed

if TYPE_CHECKING:
    import pandas as pd

    from theory_lab.models import LoadedModel

#: First tokens left out, of queries and of keys: the sink is a key that every row is meant to find.
SKIPPED = 1
#: Pairs drawn from every two texts and head, for the tails.
SAMPLES = 4096
#: t sqrt(d) of the moment generating function, both signs.
_GRID = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class UnrelatedResult:
    """What the scores of unrelated tokens are like.

    Attributes
    ----------
    rows : DataFrame
        One row a (layer, head): pairs, mean, sd, proxy, proxy_low, proxy_high (of the cosines), survivors (keys a row
        above TDA's threshold) with survivors_low, survivors_high, and survivors_centered (of the scores less their
        mean).
    samples : array, shape (layers, heads, texts, SAMPLES)
        Cosines of pairs drawn at random.
    layers : tuple of int
    head_dim : int
    length : int
    mechanism : Mechanism
        TRA with the beta and kappa of the threshold.
    spherical, gaussian : float
        Survivors a row that the theory's laws of proxy 1/d would give in the same rows.
    texts : tuple of str
    model : str
    """

    rows: pd.DataFrame
    samples: npt.NDArray[np.float32] = field(repr=False)
    layers: tuple[int, ...]
    head_dim: int
    length: int
    mechanism: Mechanism
    spherical: float
    gaussian: float
    texts: tuple[str, ...]
    model: str

    @property
    def kappa(self) -> float:
        """Allowed expected number of survivors."""
        return float(self.mechanism.arguments.get("kappa", 1.0))

    @property
    def beta(self) -> float:
        """Scale of the threshold."""
        return float(self.mechanism.arguments.get("beta", 1.0))

    def plot(self, path: str) -> list[str]:
        """Draw tails, proxies and survivors into a folder, or into one file."""
        from theory_lab.figures.unrelated_plot import plot_unrelated

        return plot_unrelated(self, path)


def unrelated_scores(
    model: str | Path | LoadedModel = DEFAULT_MODEL,
    text: str | Text | Sequence[str | Text] | None = None,
    *,
    length: int = 512,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    as_: str | Mechanism | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    attention: str | None = None,
    rope_scaling: str | None = None,
    trust_remote_code: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> UnrelatedResult:
    """Measure the scores of queries of one text against keys of another.

    Parameters
    ----------
    model, layers, heads, device, dtype, attention, rope_scaling, trust_remote_code
        As for :func:`theory_lab.probes.probe`.
    text : sequence of str or Text, optional
        At least two; the shipped texts by default. The queries of each meet the keys of the one before it.
    length : int
        Tokens of each text.
    as_ : str, optional
        "tra:beta=0.8,kappa=1": the threshold whose survivors are counted.
    seed : int
        Of the pairs drawn and of the bootstrap.
    progress : Progress, optional

    Raises
    ------
    InputError
        Fewer than two texts, or anything that a probe refuses.
    """
    from theory_lab.probes.positions import check_length, scaled_positions
    from theory_lab.probes.probing import checked_indices, checked_sources, loaded_model

    progress = progress or Silent()
    mechanism = as_ if isinstance(as_, Mechanism) else parse_mechanism(as_ or "tra")
    if mechanism.name != "tra":
        raise InputError("as", mechanism.label, "unrelated scores are held against TRA's threshold: tra:beta=1,kappa=1")
    seed = validate_seed(seed)
    if isinstance(length, bool) or not isinstance(length, int) or length < SKIPPED + 2:
        raise InputError("length", length, f"a whole number of at least {SKIPPED + 2} is allowed")
    sources = checked_sources(text)
    if len(sources) < 2:
        raise InputError("text", sources[0].name, "unrelated tokens come from two texts: give another --text")
    loaded = loaded_model(model, device, dtype, attention, trust_remote_code, progress)
    chosen = checked_indices("layers", layers, loaded.layers)
    picked = checked_indices("heads", heads, loaded.heads)
    special = texts.special_tokens(loaded.tokenizer)
    windows = [
        texts.cut(source, texts.tokenize(loaded.tokenizer, source), length, 1, seed, special)[0] for source in sources
    ]
    with scaled_positions(loaded.model, rope_scaling) as scaled:
        warning = check_length(loaded.model, length, scaled or loaded.max_positions)
        if warning:
            progress.say(warning)
        meeting = _Meeting(loaded, chosen, mechanism, length, seed, progress)
        progress.start(len(windows), 0, float((len(windows) + 1) * len(chosen)))
        try:
            for index, window in enumerate([windows[-1], *windows]):
                meeting.forward(window.ids, measure=index > 0)
                progress.advance(int(index > 0), 0.0)
        finally:
            progress.stop()
    return meeting.result(picked, tuple(source.name for source in sources))


class _Meeting:
    """Forward passes of text after text: the queries of each meet the keys of the one before."""

    def __init__(
        self,
        loaded: LoadedModel,
        layers: tuple[int, ...],
        mechanism: Mechanism,
        length: int,
        seed: int,
        progress: Progress,
    ) -> None:
        self._loaded, self._layers, self._mechanism = loaded, layers, mechanism
        self._length, self._progress = length, progress
        self._keys: dict[int, torch.Tensor] = {}
        self._measure = False
        self._grid: F64 = np.zeros(0)
        #: Per layer, one entry a text: moments of every head.
        self._moments: dict[int, list[dict[str, F64]]] = {layer: [] for layer in layers}
        self._samples: dict[int, list[npt.NDArray[np.float32]]] = {layer: [] for layer in layers}
        self._visible: F64 = np.zeros(0)
        self._seed = seed
        self._pairs: tuple[torch.Tensor, torch.Tensor] | None = None
        self._head_dim = loaded.head_dim

    def forward(self, ids: Sequence[int], measure: bool) -> None:
        """Run one text; the first run only leaves its keys."""
        from theory_lab.probes.running import run_backbone
        from theory_lab.probes.watching import watch

        self._measure = measure
        with torch.no_grad(), watch(self._loaded.model, self, layers=self._layers) as seen:
            run_backbone(self._loaded, ids)
        seen.check()

    def __call__(self, call: Any) -> None:
        from theory_kernels import attention_statistics

        q, k = call.q[:, :, SKIPPED:], call.k[:, :, SKIPPED:]
        old, self._keys[call.layer] = self._keys.get(call.layer), k.clone()
        self._progress.advance(0, 1.0)
        if not self._measure or old is None:
            return
        self._head_dim = q.shape[-1]
        self._grid = np.array([s * t * math.sqrt(self._head_dim) for s in (-1, 1) for t in _GRID])
        given = call.statistics_arguments()
        found = attention_statistics(
            q,
            old,
            **{name: given[name] for name in PLACES if given.get(name) is not None},
            weights="tra",
            **self._mechanism.arguments,
            exponents=tuple(self._grid),
            need=("rows", "scores"),
        )
        assert found.survivors is not None
        scores = found.scores[0]
        moments = {
            name: getattr(scores, name)[0].double().cpu().numpy() for name in ("count", "mean", "variance", "log_mgf")
        }
        moments["survivors"] = found.survivors[0, 0].double().mean(-1).cpu().numpy()
        self._moments[call.layer].append(moments)
        self._visible = found.visible[0, 0].double().cpu().numpy()
        self._samples[call.layer].append(self._draw(q[0], old[0], bool(given["causal"])))

    def _draw(self, q: torch.Tensor, k: torch.Tensor, causal: bool) -> npt.NDArray[np.float32]:
        """Cosines of pairs drawn at random, the same pairs in every head; shape (H, SAMPLES)."""
        if self._pairs is None or len(self._samples[self._layers[0]]) != self._drawn:
            self._drawn = len(self._samples[self._layers[0]])
            digest = cell_digest({"unrelated": self._length, "text": self._drawn}, self._seed)
            u = Stream(digest, 0, 0).uniforms(2 * SAMPLES)
            size = q.shape[1]
            # Uniform over the pairs j < i: the row has a triangular law.
            rows = np.minimum((0.5 + np.sqrt(0.25 + u[:SAMPLES] * size * (size - 1))).astype(np.int64), size - 1)
            rows = np.maximum(rows, 1) if causal else (u[:SAMPLES] * size).astype(np.int64)
            keys = (u[SAMPLES:] * (rows if causal else size)).astype(np.int64)
            self._pairs = torch.from_numpy(rows).to(q.device), torch.from_numpy(keys).to(q.device)
        assert self._pairs is not None
        rows_at, keys_at = self._pairs
        left = torch.nn.functional.normalize(q[:, rows_at].float(), dim=-1)
        right = torch.nn.functional.normalize(k[:, keys_at].float(), dim=-1)
        right = right.repeat_interleave(q.shape[0] // k.shape[0], 0)
        return (left * right).sum(-1).cpu().numpy()

    _drawn = -1

    def result(self, heads: tuple[int, ...], names: tuple[str, ...]) -> UnrelatedResult:
        """Moments of every head, pooled over texts, with intervals over them."""
        import pandas as pd

        records = []
        samples = np.stack([np.stack(self._samples[layer], 1) for layer in self._layers])[:, list(heads)]
        picks = resample(len(names), self._seed)
        beta = float(self._mechanism.arguments.get("beta", 1.0))
        kappa = float(self._mechanism.arguments.get("kappa", 1.0))
        tau = beta * np.sqrt(2.0 * np.log(np.maximum(self._visible / kappa, 1.0)) / self._head_dim)
        for at, layer in enumerate(self._layers):
            table = {name: np.stack([text[name] for text in self._moments[layer]]) for name in self._moments[layer][0]}
            for place, head in enumerate(heads):
                part = {name: value[:, head] for name, value in table.items()}
                pooled = _pooled({name: value[None] for name, value in part.items()}, self._grid)
                draws = _pooled({name: value[picks] for name, value in part.items()}, self._grid)
                cosines = np.sort(samples[at, place].reshape(-1).astype(float))
                record: dict[str, Any] = {"model": self._loaded.name, "layer": layer, "head": head}
                record |= {"length": self._length, "pairs": int(part["count"].sum())}
                record |= {"mean": pooled["mean"][0], "sd": math.sqrt(pooled["variance"][0])}
                for name in ("proxy", "survivors"):
                    low, high = ends(draws[name], pooled[name][0], len(names))
                    record |= {name: pooled[name][0], f"{name}_low": float(low), f"{name}_high": float(high)}
                above = cosines.size - np.searchsorted(cosines, tau + record["mean"], side="right")
                record["survivors_centered"] = float((self._visible * above / cosines.size).mean())
                records.append(record)
        return UnrelatedResult(
            rows=pd.DataFrame(records),
            samples=samples,
            layers=self._layers,
            head_dim=self._head_dim,
            length=self._length,
            mechanism=self._mechanism,
            spherical=self._expected("spherical", tau),
            gaussian=self._expected("gaussian", tau),
            texts=names,
            model=self._loaded.name,
        )

    def _expected(self, family: str, tau: F64) -> float:
        from theory_lab.noise import Scale, get_family

        d = self._head_dim
        law = get_family(family).scaled(Scale(1.0 / d, d))
        return float((self._visible * law.sf(tau)).mean())


def _pooled(part: dict[str, F64], grid: F64) -> dict[str, F64]:
    """Mean, variance, proxy and survivors of texts pooled along axis 1 of (R, texts, ...)."""
    weight = part["count"] / part["count"].sum(1, keepdims=True)
    mean = (weight * part["mean"]).sum(1)
    variance = (weight * (part["variance"] + (part["mean"] - mean[:, None]) ** 2)).sum(1)
    log_mgf = part["log_mgf"]
    top = log_mgf.max(1, keepdims=True)
    pooled = np.log((weight[..., None] * np.exp(log_mgf - top)).sum(1)) + top[:, 0]
    proxy = np.maximum(measures.variance_proxy(pooled, grid, mean), variance)
    return {"mean": mean, "variance": variance, "proxy": proxy, "survivors": part["survivors"].mean(1)}


__all__ = ["SAMPLES", "SKIPPED", "UnrelatedResult", "unrelated_scores"]
