"""Which share of the blocks of a trained model's keys each bound has to read.

    python kernels/benchmarks/decode_bounds.py --out decode-bounds.csv [--picture decode-bounds.png]

Queries and keys of a model on texts (after the rotary embedding, rounded to bfloat16 as a cache would hold them).
Thresholds are constant for each head, as in ETA's offline calibration: set so that a share of the keys of the sampled
rows is kept, or a share of the softmax mass. Beside them, random unit keys. Runs on the CPU; needs theory_lab.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch
from theory_kernels import make_block_bounds
from theory_kernels.attention.reference import unit_rows
from theory_kernels.decode.bounds import KINDS, upper

BLOCKS = (16, 64, 128)
KEYS = (0.001, 0.01, 0.03, 0.1, 0.38)
MASSES = (0.9, 0.99)


class Heads(NamedTuple):
    """Sampled queries (1, H, R, D) at positions (R,), and keys (1, G, S, D)."""

    name: str
    layer: int
    q: torch.Tensor
    k: torch.Tensor
    scale: float
    position: torch.Tensor


def captured(model: str, text: str, length: int, rows: int) -> list[Heads]:
    """Heads of every layer of a model on a text; rows are spread over its second half."""
    from theory_lab.probes import capture
    from theory_lab.probes.texts import shipped

    found = capture(model, {x.name: x for x in shipped()}[text], length=length)
    position = torch.linspace(length // 2, length - 1, rows).long()
    out = []
    for layer in found.layers:
        call = found.calls[layer]
        q, k = call.q[:, :, position].bfloat16(), call.k.bfloat16()
        out.append(Heads(f"{model}, {text}", layer, q, k, float(call.scale), position))
    return out


def random_unit(length: int, rows: int, dim: int, heads: int) -> list[Heads]:
    """Independent directions: nothing that a block's keys have in common."""
    g = torch.Generator().manual_seed(0)
    q, k = (unit_rows(torch.randn((1, heads, n, dim), generator=g)).bfloat16() for n in (rows, length))
    return [Heads("random unit keys", 0, q, k, 1.0, torch.linspace(length // 2, length - 1, rows).long())]


def measure(heads: Heads) -> list[dict]:
    """Rows of the table: one a query head, target, block size and bound."""
    q, k = heads.q, heads.k
    group = q.shape[1] // k.shape[1]
    score = (q.float() @ k.float().repeat_interleave(group, 1).transpose(-1, -2))[0] * heads.scale
    seen = torch.arange(k.shape[2]) <= heads.position[:, None]
    score = torch.where(seen, score, -torch.inf)
    mass = score.softmax(-1)
    targets = [("keys", x, _keep_keys(score, seen, x)) for x in KEYS]
    targets += [("mass", x, _keep_mass(score, mass, x)) for x in MASSES]
    folded = q[0].unflatten(0, (-1, group)).flatten(1, 2)[None]
    out = []
    for block in BLOCKS:
        short = -k.shape[2] % block
        top = torch.nn.functional.pad(score, (0, short), value=-torch.inf).unflatten(-1, (-1, block)).amax(-1)
        there = torch.arange(top.shape[-1]) * block <= heads.position[:, None]
        bound = {"none better": top}
        for kind in KINDS:
            bounds = make_block_bounds(k, kind, block=block)
            up = upper(bounds, folded, slice(None))[0] * heads.scale
            bound[kind] = up.unflatten(1, (group, -1)).flatten(0, 1)
            assert bool((~there | (bound[kind] >= top)).all()), f"{kind} is no bound"
        for target, value, tau in targets:
            kept = (score >= tau[:, None, None]).sum((1, 2)) / seen.sum()
            rest = (mass * (score >= tau[:, None, None])).sum(-1).mean(-1)
            for kind, x in bound.items():
                read = ((x >= tau[:, None, None]) & there).sum((1, 2)) / there.sum()
                for h in range(q.shape[1]):
                    out.append({
                        "keys": heads.name, "layer": heads.layer, "head": h, "length": k.shape[2], "block": block,
                        "target": f"{target} {value:g}", "kept_keys": float(kept[h]), "kept_mass": float(rest[h]),
                        "bound": kind, "blocks_read": float(read[h]),
                    })  # fmt: skip
    return out


def _keep_keys(score: torch.Tensor, seen: torch.Tensor, share: float) -> torch.Tensor:
    """Threshold a head (H,) that keeps a share of all visible pairs of the rows."""
    flat = score[:, seen]
    return flat.topk(max(1, round(share * flat.shape[1])), -1).values[:, -1]


def _keep_mass(score: torch.Tensor, mass: torch.Tensor, share: float) -> torch.Tensor:
    """Largest threshold a head (H,) that keeps a share of the softmax mass of its rows, on average."""
    order = score.flatten(1).sort(-1, descending=True)
    sums = mass.flatten(1).double().gather(1, order.indices).cumsum(-1) / score.shape[1]
    at = (sums < share).sum(-1, keepdim=True).clamp_max(score[0].numel() - 1)
    return order.values.gather(1, at)[:, 0]


def summarize(rows: list[dict]) -> pd.DataFrame:
    """Over layers and heads: mean and quartiles of the blocks read, means of keys and mass kept."""
    groups = pd.DataFrame(rows).groupby(["keys", "length", "block", "target", "bound"], sort=False)
    table = groups.agg(
        heads=("head", "size"), kept_keys=("kept_keys", "mean"), kept_mass=("kept_mass", "mean"),
        mean=("blocks_read", "mean"), p25=("blocks_read", lambda x: x.quantile(0.25)), median=("blocks_read", "median"),
        p75=("blocks_read", lambda x: x.quantile(0.75)),
    )  # fmt: skip
    return table.reset_index().round(5)


def draw(table: pd.DataFrame, path: Path) -> None:
    """Blocks read against keys kept, by bound: median of the heads and the middle half of them."""
    from theory_lab.figures import style

    names = list(dict.fromkeys(table["keys"]))
    # Further texts are in the table.
    panels = [(names[1], 64), (names[1], 16), (names[0], 64)]
    with style.applied():
        figure = style.new_figure("double", 2.7)
        looks = style.series_styles(list(LABELS))
        for axes, (name, block) in zip(figure.subplots(1, len(panels), sharey=True), panels, strict=True):
            chosen = table[(table["keys"] == name) & (table.block == block) & table.target.str.startswith("keys")]
            for bound, look in looks.items():
                part = chosen[chosen.bound == bound].sort_values("kept_keys")
                x = 100 * part.kept_keys
                axes.plot(x, 100 * part["median"], label=LABELS[bound], **look)
                style.band(axes, x, 100 * part.p25, 100 * part.p75, look["color"])
            axes.set(xscale="log", xlabel="keys kept (%)", ylim=(-3, 103))
            axes.set_xticks([0.1, 1, 10], ["0.1", "1", "10"])
            axes.set_title(f"{name.split(', ')[0]}, blocks of {block}")
        figure.axes[0].set_ylabel("blocks read (%)")
        figure.axes[0].legend(loc="upper left", bbox_to_anchor=(0.0, 0.95))
        style.save(figure, path, {"title": "blocks read by bound"})


LABELS = {
    "none better": "blocks with a survivor", "norm": "norm", "minmax": "min and max", "ball": "ball", "cap": "cap",
    "int8": "keys in int8",
}  # fmt: skip


def text_table(table: pd.DataFrame) -> str:
    """Median over heads of the blocks read, in percent."""
    keys = ["keys", "block", "target"]
    read = 100 * table.pivot(index=keys, columns="bound", values="median")[list(LABELS)]
    read.insert(0, "mass kept", 100 * table.groupby(keys).kept_mass.mean())
    return read.round(1).to_string()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="CSV to write")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--texts", nargs="+", default=["alice-in-wonderland", "us-constitution"])
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=32, help="query positions of a text, over its second half")
    parser.add_argument("--save", type=Path, help="write some layers' last queries and keys for decode.py --trained")
    options = parser.parse_args()
    rows: list[dict] = []
    for heads in random_unit(options.length, options.rows, 64, 9):
        rows += measure(heads)
    for text in options.texts:
        layers = captured(options.model, text, options.length, options.rows)
        for heads in layers:
            rows += measure(heads)
        if options.save is not None and text == options.texts[0]:
            some = layers[:: max(1, len(layers) // 4)][:4]
            torch.save(
                {"q": torch.cat([x.q[:, :, -16:] for x in some]), "k": torch.cat([x.k for x in some])}, options.save
            )
    table = summarize(rows)
    table.to_csv(options.out, index=False)
    print(text_table(table))
    if options.picture is not None:
        draw(table, options.picture)


if __name__ == "__main__":
    main()
