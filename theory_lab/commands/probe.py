"""``theory-lab probe``: measure a trained model's attention."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Any

import click

from theory_lab.commands.parsing import EXIT_INTERRUPTED, EXIT_USAGE, fail, one_number, one_whole
from theory_lab.errors import InputError, TheoryLabError
from theory_lab.grids import parse_numbers, parse_wholes
from theory_lab.outside import visible

if TYPE_CHECKING:
    from theory_lab.probes.plan import ProbeResult
    from theory_lab.probes.texts import Text


@click.command("probe")
@click.argument("model", required=False, metavar="[MODEL]")
@click.option("--text", "texts", multiple=True, metavar="FILE",
              help="Text to read; - is standard input. Repeatable. Default: six shipped texts.")  # fmt: skip
@click.option("--length", multiple=True, metavar="NUMBERS",
              help="Tokens T of a sequence, such as 1024 or 64:8192:x2. Default: 64:2048:x2.")  # fmt: skip
@click.option(
    "--layers", multiple=True, metavar="NUMBERS", help="Layers, from 0, such as 0,5 or 0:28:+4. Default: all."
)
@click.option("--heads", multiple=True, metavar="NUMBERS", help="Query heads, from 0. Default: all.")
@click.option("--metrics", multiple=True, metavar="NAMES",
              help="Of sinks, sparsity, entropy, maxima, survivors, scores. Default: all but scores.")  # fmt: skip
@click.option("--as", "as_", metavar="MECHANISM",
              help="What if: tra, tda, entmax or eta weights on the model's own queries and keys, with options as in "
              "tra:beta=0.8,kappa=1.")  # fmt: skip
@click.option("--unrelated", is_flag=True,
              help="Measure the scores of unrelated tokens, queries of one text against keys of another: their "
              "sub-Gaussian proxy, their tails, their survivors.")  # fmt: skip
@click.option("--windows", default="1", show_default=True, metavar="NUMBER", help="Windows cut from each text.")
@click.option("--sink-key", default="1", show_default=True, metavar="NUMBERS", help="Keys k of gSinkRatio(k), from 1.")
@click.option("--sink-eps", default="0.3", show_default=True, metavar="NUMBER", help="Threshold of the sink rate.")
@click.option("--near-zero", default="1e-6,1e-3", show_default=True, metavar="NUMBERS", help="Bounds of near zeros.")
@click.option("--device", default="cpu", show_default=True, metavar="NAME", help="cpu, cuda or cuda:N.")
@click.option("--dtype", default="float32", show_default=True, metavar="NAME",
              help="float32, bfloat16, float16 or auto.")  # fmt: skip
@click.option("--attention", metavar="NAME", help="transformers' implementation, such as sdpa or eager.")
@click.option("--rope-scaling", metavar="KIND:FACTOR",
              help="Stretch rotary positions beyond the model's: yarn:4, linear:2, dynamic:8; of our own models "
              "ntk:2.")  # fmt: skip
@click.option("--trust-remote-code", is_flag=True, help="Let the model's folder run its own code.")
@click.option("--seed", default="0", show_default=True, metavar="INTEGER", help="Of windows and of the bootstrap.")
@click.option("--out", metavar="DIR", help="Keep finished windows here; the same command continues.")
@click.option("--scheduler", metavar="ADDRESS",
              help="Measure windows on Dask workers: local, local:N, or tcp://HOST:PORT of a scheduler. Default: "
              "$THEORY_LAB_SCHEDULER, else in this process.")  # fmt: skip
@click.option("--worker-memory", metavar="SIZE",
              help="Memory of a worker of a local scheduler, such as 4GiB. Default: its part of all.")  # fmt: skip
@click.option("--format", "form", default="table", show_default=True,
              type=click.Choice(["table", "json", "csv", "parquet"]),
              help="What goes to standard output: a summary, or one row a head.")  # fmt: skip
@click.option("--plot", metavar="DIR|FILE", help="Draw into a folder, or everything into one .png, .pdf or .svg.")
@click.option("--quiet", is_flag=True, help="No progress.")
def command(**options: Any) -> int:
    """Measure a trained model's attention: sinks, zeros, entropy, survivors.

    MODEL is a known model (see theory-lab models), a folder, a .gguf file or a Hub id; smollm2-135m if left out,
    fetched at its first use.

    Exit code: 0 measured, 2 bad usage or out of memory (what fitted is printed).

    \b
    theory-lab probe
    theory-lab probe --length 64:8192:x2 --text book.txt --plot pictures
    theory-lab probe --as tra:beta=0.8 --layers 0,10,20
    theory-lab probe --unrelated --length 512
    """
    import importlib.util

    arguments = _parsed(options)
    if importlib.util.find_spec("torch") is None:
        raise InputError("probe", "torch is not installed", "pip install 'theory-lab[models]'")
    from theory_lab.probes.texts import read_text

    _check_outputs(options)
    sources = [read_text(path) for path in options["texts"]] or None
    if options["unrelated"]:
        return _unrelated(options, arguments, sources)
    return _probe(options, arguments, sources)


def _parsed(options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``probe`` from what was typed, before anything heavy is imported."""

    def wholes(name: str) -> list[int] | None:
        values = [value for text in options[name] for value in parse_wholes(text, name)]
        return values or None

    names = [part.strip() for text in options["metrics"] for part in text.split(",") if part.strip()]
    arguments = {
        "lengths": wholes("length"),
        "layers": wholes("layers"),
        "heads": wholes("heads"),
        "metrics": names if options["metrics"] else None,
        "as_": options["as_"],
        "device": options["device"],
        "dtype": options["dtype"],
        "attention": options["attention"],
        "windows": one_whole(options["windows"], "windows"),
        "seed": one_whole(options["seed"], "seed"),
        "near_zero": parse_numbers(options["near_zero"], "near-zero"),
        "sink_keys": parse_wholes(options["sink_key"], "sink-key"),
        "sink_eps": one_number(options["sink_eps"], "sink-eps"),
        "rope_scaling": options["rope_scaling"],
        "trust_remote_code": options["trust_remote_code"],
        "out": options["out"],
    }
    if options["scheduler"] is not None:
        from theory_lab.distributed.address import parse_scheduler

        parse_scheduler(options["scheduler"])
    if options["model"] == "":
        raise InputError(
            "model", "''", "a known model, a folder, a .gguf file or a Hub id; nothing at all is smollm2-135m"
        )
    if options["texts"].count("-") > 1:
        raise InputError("text", "-", "standard input can be read once")
    return arguments


def _check_outputs(options: dict[str, Any]) -> None:
    """Find out now, not after the run, that what was asked for cannot be written."""
    if options["form"] == "parquet":
        if sys.stdout.isatty():
            raise InputError("format", "parquet", "redirect it to a file: theory-lab probe --format parquet > FILE")
        from theory_lab.store import require_pyarrow

        require_pyarrow()
    if options["plot"] is not None:
        from theory_lab.figures.probe_plot import validate_plot

        validate_plot(options["plot"])


def _probe(options: dict[str, Any], arguments: dict[str, Any], sources: list[Text] | None) -> int:
    from theory_lab.probes.plan import DEFAULT_MODEL
    from theory_lab.probes.probing import probe
    from theory_lab.progress import make_progress

    partial: list[ProbeResult] = []
    try:
        result = probe(
            options["model"] or DEFAULT_MODEL,
            sources,
            **arguments,
            scheduler=options["scheduler"],
            worker_memory=options["worker_memory"],
            progress=make_progress(options["quiet"], "probing", "windows"),
            on_partial=partial.append,
        )
    except (KeyboardInterrupt, TheoryLabError) as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        if not interrupted and not partial:
            raise
        fail("interrupted" if interrupted else str(error))
        if partial:
            _print(partial[0], options)
            click.echo("what was finished is above; the rest was not measured", err=True)
        if options["out"] is not None:
            click.echo(f"finished windows are in {options['out']}; the same command continues: {_typed()}", err=True)
        elif interrupted:
            click.echo("with --out DIR finished windows are kept, and the same command continues", err=True)
        raise click.exceptions.Exit(EXIT_INTERRUPTED if interrupted else EXIT_USAGE) from None
    _print(result, options)
    if options["plot"]:
        for path in result.plot(options["plot"]):
            click.echo(visible(f"picture: {path}"), err=True)
    if not result.complete:
        fail("out of memory: not everything was measured; see the notes")
        return EXIT_USAGE
    return 0


def _typed() -> str:
    return "theory-lab " + shlex.join(sys.argv[1:])


def _print(result: ProbeResult, options: dict[str, Any]) -> None:
    if options["form"] == "table":
        from theory_lab.render_probe import print_probe

        print_probe(result)
    else:
        _print_rows(result.rows, options["form"])


def _print_rows(rows: Any, form: str) -> None:
    from theory_lab import render

    if form == "json":
        click.echo(render.to_json(rows))
    elif form == "csv":
        click.echo(render.to_csv(rows), nl=False)
    else:
        from theory_lab.store import rows_to_parquet

        sys.stdout.buffer.write(rows_to_parquet(rows))
        sys.stdout.buffer.flush()


def _unrelated(options: dict[str, Any], arguments: dict[str, Any], sources: list[Text] | None) -> int:
    from theory_lab.probes.plan import DEFAULT_MODEL
    from theory_lab.probes.unrelated import unrelated_scores
    from theory_lab.progress import make_progress

    lengths = arguments["lengths"]
    if lengths is not None and len(lengths) != 1:
        raise InputError("length", ", ".join(map(str, lengths)), "--unrelated takes one length")
    for name in ("out", "metrics", "scheduler", "worker-memory"):
        value = {**options, **arguments}[name.replace("-", "_")]
        if value is not None:
            raise InputError(name, str(value), f"--unrelated does not take --{name}")
    result = unrelated_scores(
        options["model"] or DEFAULT_MODEL,
        sources,
        length=lengths[0] if lengths else 512,
        layers=arguments["layers"],
        heads=arguments["heads"],
        as_=arguments["as_"],
        device=arguments["device"],
        dtype=arguments["dtype"],
        attention=arguments["attention"],
        rope_scaling=arguments["rope_scaling"],
        trust_remote_code=arguments["trust_remote_code"],
        seed=arguments["seed"],
        progress=make_progress(options["quiet"], "probing", "texts"),
    )
    if options["form"] == "table":
        from theory_lab.render_probe import print_unrelated

        print_unrelated(result)
    else:
        _print_rows(result.rows, options["form"])
    if options["plot"]:
        for path in result.plot(options["plot"]):
            click.echo(visible(f"picture: {path}"), err=True)
    return 0
