"""``theory-lab train``: train a model with any attention."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import click

from theory_lab.commands.parsing import EXIT_HOLDS, named, one_number, one_whole, pairs
from theory_lab.errors import InputError, TheoryLabError

if TYPE_CHECKING:
    from theory_lab.training.settings import TrainSettings

_WHOLES = (
    "steps", "batch", "length", "accumulation", "warmup", "seed", "eval_every", "eval_batches", "save_every", "keep",
    "log_every",
)  # fmt: skip
_NUMBERS = ("lr", "lr_min", "weight_decay", "clip")
_WORDS = ("size", "corpus", "task", "dtype", "device", "start", "out")


@click.command("train")
@click.option("--preset", metavar="NAME", help="Start from named settings, such as tda.small; see --presets.")
@click.option("--presets", "list_presets", is_flag=True, help="List the named settings, and leave.")
@click.option("--attention", metavar="NAME",
              help="A mechanism, with options as in tda:beta=0.8,eps=1e-2. Default: softmax.")  # fmt: skip
@click.option("--size", metavar="NAME", help="recall, pico, small or paper. Default: pico.")
@click.option("--model", metavar="KEY=VALUE,...",
              help="Fields of the model's configuration, as in positions=nape,num_hidden_layers=6.")  # fmt: skip
@click.option("--corpus", metavar="DIR", help="Train on a corpus; theory-lab corpus build makes one.")
@click.option("--task", metavar="NAME",
              help="Train on a task, with options as in recall:queries=8; or on several in turn, as in "
              "'passkey + multi-needle:needles=4'. Words take the text of --corpus.")  # fmt: skip
@click.option("--steps", metavar="NUMBER", help="Optimizer steps. Default: 200.")
@click.option("--batch", metavar="NUMBER", help="Sequences a step, over all processes. Default: 8.")
@click.option("--length", metavar="NUMBER", help="Tokens T of a sequence. Default: 256.")
@click.option("--accumulation", metavar="NUMBER", help="Parts of a step, to save memory. Default: 1.")
@click.option("--lr", metavar="NUMBER", help="Learning rate after the warm-up. Default: 1e-3.")
@click.option("--lr-min", metavar="NUMBER", help="At the end of the cosine. Default: 1e-4.")
@click.option("--warmup", metavar="NUMBER", help="Steps of linear warm-up. Default: a twentieth of the steps.")
@click.option("--weight-decay", metavar="NUMBER", help="Of AdamW. Default: 0.1.")
@click.option("--clip", metavar="NUMBER", help="Largest norm of the gradient. Default: 1.")
@click.option("--seed", metavar="INTEGER", help="Of weights and data. Default: 0.")
@click.option("--dtype", metavar="NAME", help="float32, bfloat16 or auto: bfloat16 on a GPU. Default: auto.")
@click.option("--device", metavar="NAME", help="cpu, cuda, cuda:N or auto. Default: auto.")
@click.option("--start", metavar="DIR|NAME",
              help="Start from a trained model: its folder, or a name of the zoo such as tda-pico. What is not given, "
              "the attention included, is as in it.")  # fmt: skip
@click.option("--eval-every", metavar="NUMBER", help="Steps between evaluations. Default: at the end alone.")
@click.option("--eval-batches", metavar="NUMBER", help="Held-out batches of one. Default: 8.")
@click.option("--log-every", metavar="NUMBER", help="Steps between rows of log.csv. Default: 1.")
@click.option("--save-every", metavar="NUMBER",
              help="Steps between checkpoints, 0 for none. Default: a tenth of the steps.")  # fmt: skip
@click.option("--keep", metavar="NUMBER", help="Checkpoints to keep, the newest. Default: 2.")
@click.option("--graph/--no-graph", default=None,
              help="Capture the step in a CUDA graph. Default: wherever it can be.")  # fmt: skip
@click.option("--compile", "compiled", is_flag=True, help="Compile the model with torch.compile.")
@click.option("--out", metavar="DIR", help="The model's folder; the same command continues a run that was killed.")
@click.option("--format", "form", default="table", show_default=True, type=click.Choice(["table", "json"]),
              help="What goes to standard output: a summary, or the run's record.")  # fmt: skip
@click.option("--quiet", is_flag=True, help="No progress.")
def command(**options: Any) -> int:
    """Train a model with any attention, on a corpus or a task.

    The folder of --out is a model that theory-lab probe, explore and evaluate take, with its losses in log.csv and what
    its layers do in layers.csv. Killed at any moment, the same command continues.

    Exit code: 0 trained, 2 bad usage, a loss that is no number, out of memory or disk, 130 interrupted, 143 by SIGTERM.

    \b
    theory-lab train --attention tda --corpus DIR --out tda-pico
    theory-lab train --attention asentmax --size recall --task recall:queries=8 --length 64 --steps 2000 --out m
    theory-lab train --preset tda.small --corpus DIR --out m
    theory-lab train --start tda-pico --task passkey --length 512 --out finder
    torchrun --nproc-per-node 8 -m theory_lab.main train --preset tda.paper --corpus DIR --out m
    """
    import importlib.util

    if options["list_presets"]:
        return _list()
    settings = _settings(options)
    for package in ("torch", "transformers", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise InputError("train", f"{package} is not installed", "pip install 'theory-lab[train]'")
    from theory_lab.progress import make_progress
    from theory_lab.training import train

    try:
        result = train(settings, progress=make_progress(options["quiet"], "training", "steps"))
    except TheoryLabError as error:
        if os.environ.get("RANK", "0") != "0":
            raise click.exceptions.Exit(error.exit_code) from None  # the first process says it for all
        raise
    if os.environ.get("RANK", "0") == "0":
        _print(result.record, options)
    if "RANK" in os.environ:
        from theory_lab.training.device import leave

        leave()
    return EXIT_HOLDS


def _settings(options: dict[str, Any]) -> TrainSettings:
    """Parse what was typed; nothing heavy is imported until the numbers make sense."""
    from theory_lab.training.presets import get_preset
    from theory_lab.training.settings import TrainSettings

    given: dict[str, Any] = {} if options["preset"] is None else dict(get_preset(options["preset"]).train)
    for names, read in ((_WHOLES, one_whole), (_NUMBERS, one_number)):
        for name in names:
            if options[name] is not None:
                given[name] = read(options[name], name.replace("_", "-"))
    for name in _WORDS:
        if options[name] is not None:
            if not options[name].strip():
                raise InputError(name, "''", "a value is needed")
            given[name] = options[name]
    if options["attention"] is not None:
        given["attention"], given["attention_parameters"] = named(options["attention"], "attention")
    if options["model"] is not None:
        given["model"] = {**given.get("model", {}), **pairs(options["model"], "model")}
    if options["corpus"] is not None and options["task"] is None:
        given.pop("task", None)  # the preset's
    if options["graph"] is not None:
        given["graph"] = options["graph"]
    if options["compiled"]:
        given["compile"] = True
    if given.get("start") is not None:
        from theory_lab.training.starting import inherited

        TrainSettings(**given)  # numbers that make no sense are told before anything heavy is imported
        given = inherited(given)
    return TrainSettings(**given)


def _list() -> int:
    from theory_lab.training.presets import presets

    found = presets()
    width = max(map(len, found), default=0)
    for preset in found.values():
        click.echo(f"{preset.name:{width}}  {preset.title}")
    return EXIT_HOLDS


def _print(record: dict[str, Any], options: dict[str, Any]) -> None:
    if options["form"] == "json":
        click.echo(json.dumps(record, indent=1))
        return
    error = "" if record["val_loss_se"] is None else f" +- {record['val_loss_se']:.4f}"
    rows = [
        ("model", f"{record['settings']['attention']}, {record['parameters']:,} parameters"),
        ("trained on", f"{record['tokens']:,} tokens in {record['steps']:,} steps, on {record['device']}"),
        ("held-out loss", f"{record['val_loss']:.4f}{error} nats a token"),
    ]
    if record["val_accuracy"] is not None:
        rows.append(("held-out accuracy", f"{record['val_accuracy']:.1%} of the scored tokens"))
    rows.append(("speed", f"{record['tokens_per_second']:,.0f} tokens/s"))
    if record["mfu"] is not None:
        rows.append(("of the device's limit", f"{record['mfu']:.1%}"))
    if options["out"] is not None:
        rows.append(("folder", options["out"]))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        click.echo(f"{name:{width}}  {value}")
