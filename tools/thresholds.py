"""Measured data of thresholds and temperatures, as experiments/*/measured/*.csv.

    python tools/thresholds.py --eta eta-pico --asentmax asentmax-pico --calibrated SMOLLM2.json ... [--out experiments]

`--eta` names a model trained with ETA, whose learned thresholds are measured; `--asentmax` one trained with ASEntmax,
whose temperatures are; `--calibrated` takes files that ``theory-lab calibrate MODEL --out FILE`` wrote. Fresh text: the
six that the package ships, which none of the models was trained on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import theory_lab.models.lab  # noqa: F401 - registers the models of the laboratory with transformers
from theory_lab.calibration import Calibration, measure_learned
from theory_lab.models import load_model
from theory_lab.probes import texts
from theory_lab.probes.watching import watch


def percent(value: float) -> str:
    return f"{100 * value:.3g}"


def eta(model: str, length: int, windows: int) -> tuple[Calibration, list[str], list[str]]:
    """Rows of the table and of the density of a trained ETA model."""
    found = measure_learned(model, length=length, windows=windows, prune="exact")
    name = "learned thresholds"
    table = [
        f"{name},computation saved,{percent(found.saved_keys)},,",
        f'{name},"loss change, %",{percent(found.change)},{percent(found.change_low)},{percent(found.change_high)}',
        f'{name},"rows without a key, %",{percent(found.dead_rows)},,',
    ]
    density = [f"ETA,{n},{percent(share)},," for n, share in found.density.items()]
    return found, table, density


def calibrated(files: list[Path]) -> tuple[list[str], list[str], list[dict[str, Any]]]:
    """Rows of the table and of the density of calibrated thresholds; the first file is the paper's row."""
    table, density, every = [], [], []
    for place, file in enumerate(files):
        found = json.loads(file.read_text(encoding="utf-8"))
        every.append(found)
        name = "calibrated thresholds"
        if place:
            name += f", {100 * found['budget']:.3g}% of the mass"
        table += [
            f'"{name}",computation saved,{percent(found["saved_keys"])},,',
            ",".join(
                [f'"{name}"', '"loss change, %"', *(percent(found[x]) for x in ("change", "change_low", "change_high"))]
            ),
            f'"{name}","rows without a key, %",{percent(found["dead_rows"])},,',
        ]
        series = f"SmolLM2, {100 * found['budget']:.3g}% of the mass"
        density += [f'"{series}",{n},{percent(share)},,' for n, share in found["density"].items()]
    return table, density, every


@torch.no_grad()
def temperatures(model: str, length: int) -> list[str]:
    """1 / the mean factor of the logits, by layer and head, over the rows of one window a text."""
    from theory_lab.attention.base import Scope

    loaded = load_model(model)
    sums: dict[int, list[torch.Tensor]] = {}

    def see(call: Any) -> None:
        x = call.own.x.float()
        n = torch.arange(1, x.shape[1] + 1, dtype=torch.float32)[:, None].expand(1, call.q.shape[1], -1, 1)
        scope = Scope(torch.empty(0), n, True, call.q.shape[-1], x, call.q.float())
        factor = call.own.mechanism.logit_scale(scope, n)
        sums.setdefault(call.layer, []).append(factor[0, ..., 0].mean(-1))

    special = texts.special_tokens(loaded.tokenizer)
    with watch(loaded.model, see):
        for text in texts.shipped():
            for window in texts.cut(text, texts.tokenize(loaded.tokenizer, text), length, 1, 0, special):
                loaded.model(input_ids=torch.tensor([window.ids]), use_cache=False)
    return [
        f"{layer},{head},{1.0 / float(value):.6g}"
        for layer, found in sorted(sums.items())
        for head, value in enumerate(torch.stack(found).mean(0))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--eta", help="a model trained with ETA")
    parser.add_argument("--asentmax", help="a model trained with ASEntmax")
    parser.add_argument("--calibrated", type=Path, nargs="*", default=[], help="files of theory-lab calibrate")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("experiments"))
    args = parser.parse_args()
    about = [
        f"# made by: tools/thresholds.py --length {args.length} --windows {args.windows}",
        "# device: CPU",
        "# seed: 0",
    ]
    if args.asentmax:
        rows = temperatures(args.asentmax, args.length)
        write(args.out / "asentmax/measured/figure-temperatures.csv", [*about, "row,column,value", *rows])
    table, density, notes = [], [], []
    if args.calibrated:
        table, density, found = calibrated(args.calibrated)
        notes = [
            f"# {each['model']}: {each['criterion']} {each['target']}, {each['windows']} windows of {each['length']}"
            for each in found
        ]
    if args.eta:
        measured, more, curve = eta(args.eta, args.length, args.windows)
        table, density = table + more, curve + density
        notes.append(f"# {Path(args.eta).name}: {measured.windows} windows of {measured.length} tokens")
    if table:
        write(args.out / "eta/measured/table-calibration.csv", [*about, *notes, "row,column,value,low,high", *table])
        write(args.out / "eta/measured/figure-density.csv", [*about, *notes, "series,x,value,low,high", *density])


def write(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
