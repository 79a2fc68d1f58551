"""``theory-lab calibrate``: constant thresholds for a trained model's heads, and what they save and cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from theory_lab.commands.parsing import EXIT_INTERRUPTED, fail, one_number, one_whole
from theory_lab.errors import InputError

if TYPE_CHECKING:
    from theory_lab.calibration import Calibration


@click.command("calibrate")
@click.argument("model", required=False, metavar="[MODEL]")
@click.option("--text", "texts", multiple=True, metavar="FILE",
              help="Text to calibrate on; - is standard input. Repeatable. Default: three shipped texts.")  # fmt: skip
@click.option("--held-out", multiple=True, metavar="FILE",
              help="Text to measure on. Repeatable. Default: the other shipped texts.")  # fmt: skip
@click.option("--target", default="0.01", show_default=True, metavar="NUMBER",
              help="Share of its attention that a head may lose, or relative rise of the loss, on the calibration "
              "text.")  # fmt: skip
@click.option("--criterion", default="mass", show_default=True, type=click.Choice(["mass", "loss"]),
              help="What the target bounds.")  # fmt: skip
@click.option("--learned", is_flag=True,
              help="Measure the thresholds that a model trained with ETA has learned, and set none.")  # fmt: skip
@click.option("--length", default="1024", show_default=True, metavar="NUMBER", help="Tokens of a window.")
@click.option("--windows", default="1", show_default=True, metavar="NUMBER", help="Windows cut from each text.")
@click.option("--block", default="64", show_default=True, metavar="NUMBER", help="Keys read or skipped together.")
@click.option("--device", default="cpu", show_default=True, metavar="NAME", help="cpu, cuda or cuda:N.")
@click.option("--dtype", default="float32", show_default=True, metavar="NAME",
              help="float32, bfloat16, float16 or auto.")  # fmt: skip
@click.option("--trust-remote-code", is_flag=True, help="Let the model's folder run its own code.")
@click.option("--seed", default="0", show_default=True, metavar="INTEGER", help="Of the places of the windows.")
@click.option("--out", metavar="FILE", help="Write thresholds and measurements here, as JSON.")
@click.option("--format", "form", default="table", show_default=True, type=click.Choice(["table", "json", "csv"]),
              help="What goes to standard output: a summary, everything, or one row a head.")  # fmt: skip
@click.option("--quiet", is_flag=True, help="No progress.")
def command(**options: Any) -> int:
    """Set a constant threshold for every head, and measure on other text what that saves and costs.

    MODEL is a known model (see theory-lab models), a folder, a .gguf file or a Hub id; smollm2-135m if left out. Keys
    whose score lies below a head's threshold are dropped, and softmax runs over the others.

    \b
    theory-lab calibrate --target 0.01 --out thresholds.json
    theory-lab calibrate --criterion loss --target 0.001 --text book.txt --held-out other.txt
    """
    import importlib.util

    arguments = {
        "target": one_number(options["target"], "target"),
        "criterion": options["criterion"],
        "length": one_whole(options["length"], "length"),
        "windows": one_whole(options["windows"], "windows"),
        "block": one_whole(options["block"], "block"),
        "seed": one_whole(options["seed"], "seed"),
        "device": options["device"],
        "dtype": options["dtype"],
        "trust_remote_code": options["trust_remote_code"],
    }
    if (*options["texts"], *options["held_out"]).count("-") > 1:
        raise InputError("text", "-", "standard input can be read once")
    if importlib.util.find_spec("torch") is None:
        raise InputError("calibrate", "torch is not installed", "pip install 'theory-lab[models]'")
    from theory_lab.calibration import calibrate_thresholds, measure_learned
    from theory_lab.probes.plan import DEFAULT_MODEL
    from theory_lab.probes.texts import read_text
    from theory_lab.progress import make_progress
    from theory_lab.store import write_whole

    _check_out(options["out"])
    model, progress = options["model"] or DEFAULT_MODEL, make_progress(options["quiet"], "calibrating", "passes")
    sources = [read_text(path) for path in options["texts"]] or None
    held_out = [read_text(path) for path in options["held_out"]] or None
    try:
        if options["learned"]:
            for name in ("target", "criterion", "trust_remote_code"):
                arguments.pop(name)
            if sources is not None:
                raise InputError("text", "--learned", "nothing is calibrated: name texts to measure on by --held-out")
            found = measure_learned(model, held_out, progress=progress, **arguments)
        else:
            found = calibrate_thresholds(model, sources, held_out=held_out, progress=progress, **arguments)
    except KeyboardInterrupt:
        fail("interrupted; nothing was written")
        return EXIT_INTERRUPTED
    _print(found, options["form"])
    if options["out"] is not None:
        write_whole(options["out"], found.to_json().encode())
    return 0


def _check_out(path: str | None) -> None:
    """Find out now, not after the run, that a file cannot be written there."""
    from pathlib import Path

    if path is None:
        return
    if not path or Path(path).is_dir():
        raise InputError("out", path, "a file is allowed, and this is a folder")
    if not Path(path).absolute().parent.is_dir():
        raise InputError("out", path, "its folder has to exist")


def _print(found: Calibration, form: str) -> None:
    if form == "json":
        click.echo(found.to_json(), nl=False)
    elif form == "csv":
        from theory_lab import render

        click.echo(render.to_csv(found.rows()), nl=False)
    else:
        click.echo("\n".join(_lines(found)))


def _lines(found: Calibration) -> list[str]:
    """The summary, for people."""
    interval = ""
    if found.change_low == found.change_low:
        interval = f" [{100 * found.change_low:+.2f}%, {100 * found.change_high:+.2f}%]"
    rows = found.rows()
    learned = found.criterion == "learned"
    source = "learned with the model" if learned else f"from {', '.join(found.calibration_texts)}"
    mass = f"mass a head may lose     {100 * found.budget:.3g}%"
    mass += f" (loss target {100 * found.target:.3g}%)" if found.criterion == "loss" else ""
    lines = [
        f"{found.model}: thresholds of {len(rows)} heads {source}",
        f"measured on {found.windows} windows of {found.length:,} tokens from {', '.join(found.held_out_texts)}",
        "",
        *([] if learned else [mass]),
        f"keys not computed        {100 * found.saved_keys:.1f}%",
        f"blocks of {found.block} not read    {100 * found.saved_blocks:.1f}%",
        f"rows without a key       {100 * found.dead_rows:.3g}%",
        f"loss, nats a token       {found.loss:.4f} -> {found.pruned_loss:.4f}",
        f"change of the loss       {100 * found.change:+.2f}%{interval}",
        "",
        "layer  keys not computed by its heads: least, mean, most",
    ]
    for layer, heads in rows.groupby("layer"):
        saved = 100 * heads.saved_keys
        lines.append(f"{layer:>5}  {saved.min():5.1f}%  {saved.mean():5.1f}%  {saved.max():5.1f}%")
    return lines
