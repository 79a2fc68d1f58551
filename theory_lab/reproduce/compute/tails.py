"""The kind ``tails``: are the scores of unrelated tokens of a trained model what the theorems assume?

Unrelated for certain: the queries of one text and the keys of another, at the positions that they have in their texts,
each key before its query. Cosines, as TDA compares them. The first key of a text takes part or not: in a trained
softmax model it is a sink, which many queries seek whatever they are about.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from theory_lab.reproduce.compute.probe import model_need

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd
    import torch

    from theory_lab.reproduce.needs import Need
    from theory_lab.reproduce.run import Context
    from theory_lab.reproduce.spec import Experiment

KEYS = ("every key", "without the first key")
_POINTS = 49  # of the tail's grid, from 0 to 1
#: t of E exp(t X), in units of sqrt(d): the proxy is a supremum over them.
_STEP, _STEPS = 0.5, 20
_EXPONENTS = tuple(sign * _STEP * step for sign in (-1, 1) for step in range(1, _STEPS + 1))


def need(experiment: Experiment, settings: Mapping[str, Any], data: str) -> Need | None:
    """The model, if it is not on this machine."""
    return model_need(experiment, settings)


@dataclass
class _Sums:
    """Sums over one layer's scores of one pair of texts, a head each."""

    count: int = 0
    total: np.ndarray = field(default_factory=lambda: np.zeros(0))
    exceed: np.ndarray = field(default_factory=lambda: np.zeros(0))
    mgf: np.ndarray = field(default_factory=lambda: np.zeros(0))


def compute(experiment: Experiment, settings: dict[str, Any], context: Context) -> pd.DataFrame:
    """Tail, expected survivors and variance proxy, pooled over heads and by layer.

    Returns
    -------
    DataFrame
        quantity (``tail``: P(s > t); ``survivors``: n P(s > tau_n) with beta = kappa = 1; ``sigma``: sqrt(d proxy) of
        a layer's heads, centered; ``mean``: of a layer's scores), keys, x (t; n; layer), estimate, ci_low, ci_high
        (over pairs of texts; for sigma over them too, of the median head), heads_low, heads_high (10% and 90% of the
        heads), head_dim, model, seed.
    """
    import pandas as pd
    import torch

    from theory_lab.models import load_model

    tokens = settings["tokens"]
    if tokens < 8:
        raise experiment.error("tokens", tokens, "at least 8 are needed")
    lengths = sorted(set(settings["lengths"]))
    if lengths[0] < 2:
        raise experiment.error("lengths", lengths[0], "at least 2 keys are needed")
    loaded = load_model(settings["model"])
    dim = loaded.head_dim
    grid = np.linspace(0.0, 1.0, _POINTS)
    taus = np.sqrt(2.0 * np.log(np.asarray(lengths, float)) / dim)
    levels = torch.from_numpy(np.concatenate([grid, taus]).astype(np.float32))
    with torch.no_grad():
        captured = _capture(loaded, tokens, context)
        pairs = [(a, (a + 1) % len(captured)) for a in range(len(captured))]
        layers = sorted(captured[0])
        sums = [
            [_layer(captured[a][layer][0], captured[b][layer][1], levels, dim) for layer in layers] for a, b in pairs
        ]
    records: list[dict[str, Any]] = []
    for which, keys in enumerate(KEYS):
        records += _records(keys, [[layer[which] for layer in pair] for pair in sums], grid, lengths, dim, experiment)
    return pd.DataFrame(records).assign(head_dim=dim, model=settings["model"], seed=experiment.seed)


def _capture(loaded: Any, tokens: int, context: Context) -> list[dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    """Unit queries (H, T, D) and keys (H, T, D) of every layer, text by text."""
    import torch
    from torch.nn.functional import normalize

    from theory_lab.probes import texts, watch

    special = texts.special_tokens(loaded.tokenizer)
    shipped = texts.shipped()
    found = []
    if context.progress is not None:
        context.progress.start(len(shipped), 0, float(len(shipped)))
    for text in shipped:
        window = texts.cut(text, texts.tokenize(loaded.tokenizer, text), tokens, 1, 0, special)[0]
        layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def keep(call: Any, layers: dict[int, Any] = layers) -> None:
            group = call.q.shape[1] // call.k.shape[1]
            k = call.k.repeat_interleave(group, 1)
            layers[call.layer] = (normalize(call.q[0].float(), dim=-1), normalize(k[0].float(), dim=-1).clone())

        with watch(loaded.model, keep):
            loaded.backbone(torch.tensor([window.ids]), use_cache=False)
        found.append(layers)
        if context.progress is not None:
            context.progress.advance(1, 1.0)
    if context.progress is not None:
        context.progress.stop()
    return found


def _layer(q: torch.Tensor, k: torch.Tensor, levels: torch.Tensor, dim: int) -> tuple[_Sums, _Sums]:
    """Sums over every pair with the key before the query: with the first key, and without it."""
    import torch

    scores = q @ k.transpose(-1, -2)
    before = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(-1)
    later = before.clone()
    later[:, 0] = False
    found = []
    for mask in (before, later):
        x = scores[:, mask]  # (H, pairs)
        wide = x.double()
        ordered = x.sort(-1).values
        below = torch.searchsorted(ordered, levels.expand(len(x), -1).contiguous(), right=True)
        mgf = _exponential_sums(wide * math.sqrt(dim))
        found.append(_Sums(x.shape[-1], wide.sum(-1).numpy(), (x.shape[-1] - below).double().numpy(), mgf.numpy()))
    return found[0], found[1]


def _exponential_sums(x: torch.Tensor) -> torch.Tensor:
    """Sums of exp(t x) over the last axis for every exponent, (H, exponents): powers of one exponential."""
    import torch

    found = []
    for sign in (-1.0, 1.0):
        base = torch.exp(sign * _STEP * x)
        power = torch.ones_like(base)
        for _ in range(_STEPS):
            power *= base
            found.append(power.sum(-1))
    return torch.stack(found, -1)


def _records(
    keys: str, sums: list[list[_Sums]], grid: np.ndarray, lengths: list[int], dim: int, experiment: Experiment
) -> list[dict[str, Any]]:
    from theory_lab.probes.measures import variance_proxy

    exceed = np.array([[s.exceed / s.count for s in pair] for pair in sums])  # (pairs, layers, heads, levels)
    means = np.array([[s.total / s.count for s in pair] for pair in sums])
    mgf = np.array([[s.mgf / s.count for s in pair] for pair in sums])
    proxy = variance_proxy(np.log(mgf), np.asarray(_EXPONENTS) * math.sqrt(dim), means)
    sigma = np.sqrt(np.maximum(proxy, 0.0) * dim)
    records = []
    for index, x in enumerate([*grid, *lengths]):
        tail = index < len(grid)
        values = exceed[..., index] * (1.0 if tail else float(x))
        name = "tail" if tail else "survivors"
        records.append(_record(name, keys, float(x), values.mean((1, 2)), values.mean(0).ravel(), experiment))
    for layer in range(sigma.shape[1]):
        by_pair, by_head = np.median(sigma[:, layer], -1), sigma[:, layer].mean(0)
        records.append(_record("sigma", keys, float(layer), by_pair, by_head, experiment))
        by_pair, by_head = means[:, layer].mean(-1), means[:, layer].mean(0)
        records.append(_record("mean", keys, float(layer), by_pair, by_head, experiment))
    return records


def _record(
    quantity: str, keys: str, x: float, by_pair: np.ndarray, by_head: np.ndarray, experiment: Experiment
) -> dict[str, Any]:
    from theory_lab.probes.bootstrap import interval

    found = interval(by_pair, experiment.seed)
    low, high = np.quantile(by_head, [0.1, 0.9])
    return {
        "quantity": quantity, "keys": keys, "x": x, "estimate": found.estimate, "ci_low": found.ci_low,
        "ci_high": found.ci_high, "heads_low": float(low), "heads_high": float(high),
    }  # fmt: skip
