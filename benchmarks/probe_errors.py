"""How far a probe's statistics are from those of whole maps, for every layer and head of a model.

    python benchmarks/probe_errors.py --length 300
    python benchmarks/probe_errors.py --length 2048 --device cuda --implementation triton

Each head's map is made from the model's own queries and keys twice: in float64, which defines correct, and in float32
by the formula of the model's eager attention. A statistic may be off by twice the sum of what the float32 map is off
and of its rounding band, eps (1 + scale |q| |k|) times its size: an error of eps |q| |k| in a score is a factor of a
weight. A count may differ by as many weights as lie nearer to its bound than that. Printed is the worst error as a part
of what is allowed; above 1 the script ends with 1.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict

import torch
from theory_kernels import AttentionStatistics, attention_statistics
from torch import Tensor

from theory_lab.models import load_model
from theory_lab.probes import AttentionCall, texts, watch
from theory_lab.probes.running import run_backbone

BOUNDS = (1e-6, 1e-3)
#: Three tf32 products leave out low times low, 2^-21 of a product.
EPS = {"chunked": 2.0**-23, "triton": 2.0**-21}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--implementation", default="chunked", choices=list(EPS))
    chosen = parser.parse_args()
    loaded = load_model(chosen.model, device=chosen.device, dtype="float32")
    ids = texts.tokenize(loaded.tokenizer, texts.shipped()[0])[: chosen.length]
    worst: dict[str, tuple[float, int, int]] = defaultdict(lambda: (0.0, 0, 0))
    heads, apart = 0, 0

    def compare(call: AttentionCall) -> None:
        nonlocal heads, apart
        share = call.q.shape[1] // call.k.shape[1]
        found = attention_statistics(
            call.q, call.k, **call.statistics_arguments(), near_zero=BOUNDS, implementation=chosen.implementation
        )
        for head in range(call.q.shape[1]):
            q, k = call.q[0, head], call.k[0, head // share]
            found_ratios, differing = ratios(q, k, call.scale, found, head, EPS[chosen.implementation])
            for name, ratio in found_ratios.items():
                worst[name] = max(worst[name], (ratio, call.layer, head))
            heads, apart = heads + 1, max(apart, differing)
        print(f"layer {call.layer}: so far {max(ratio for ratio, _, _ in worst.values()):.3f}", flush=True)

    with torch.no_grad(), watch(loaded.model, compare):
        run_backbone(loaded, ids)
    for name, (ratio, layer, head) in worst.items():
        print(f"{name}: {ratio:.3f} of what is allowed (layer {layer}, head {head})")
    top = max(ratio for ratio, _, _ in worst.values())
    print(f"near-zero counts: at most {apart} of {len(ids) * (len(ids) + 1) // 2:,} entries differ")
    print(f"{loaded.name}, {len(ids)} tokens, {heads} heads, {chosen.implementation}: worst {top:.3f}")
    return int(top > 1)


def ratios(
    q: Tensor, k: Tensor, scale: float, found: AttentionStatistics, head: int, eps: float
) -> tuple[dict[str, float], int]:
    """Errors of one head's statistics, each as a part of what is allowed, and the largest error of a count."""
    exact, eager = statistics(q.double(), k.double(), scale), statistics(q, k, scale)
    seen = torch.ones_like(exact["map"], dtype=torch.bool).tril()
    size = float((q.double().abs() @ k.double().abs().mT).masked_fill(~seen, 0.0).max())
    band = eps * (1.0 + scale * size)
    result: dict[str, float] = {}
    apart = 0
    near_zero = found.near_zero
    assert near_zero is not None
    for name in ("mass", "entropy", "maximum", "column_mass"):
        want = exact[name]
        for norm in (torch.inf, 2.0):
            error, slip, full = (
                float(torch.linalg.vector_norm(x, norm))
                for x in (getattr(found, name)[0, head] - want, eager[name] - want, want)
            )
            allowed = 2 * (slip + band * full)
            result[name] = max(result.get(name, 0.0), error / allowed)
    for index, bound in enumerate(BOUNDS):
        doubtful = int((seen & ((exact["map"] - bound).abs() <= 4 * band * bound)).sum())
        error = abs(int(near_zero[0, head, index]) - int((seen & (exact["map"] < bound)).sum()))
        # Where one weight lies on the bound and falls to the other side, the error is all that is allowed.
        if error > doubtful:
            result[f"near_zero {bound:g}"] = float("inf")
        apart = max(apart, error)
    return result, apart


def statistics(q: Tensor, k: Tensor, scale: float) -> dict[str, Tensor]:
    """A causal map and its statistics; the map in the dtype of the operands, the sums in float64."""
    scores = q @ k.mT * scale
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
    w = scores.masked_fill_(hidden, -torch.inf).softmax(-1).double()
    return {
        "map": w,
        "mass": w.sum(-1),
        "entropy": torch.special.entr(w).sum(-1),
        "maximum": w.amax(-1),
        "column_mass": w.sum(-2),
    }


if __name__ == "__main__":
    sys.exit(main())
