"""``theory-lab evaluate``: let a model take a test."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from theory_lab.commands.parsing import EXIT_INTERRUPTED, EXIT_USAGE, fail, one_number, one_whole
from theory_lab.errors import InputError, TheoryLabError
from theory_lab.grids import parse_wholes

if TYPE_CHECKING:
    from theory_lab.tasks.evaluation import TaskResult


@click.command("evaluate")
@click.argument("model", metavar="MODEL")
@click.option("--task", "spec", metavar="NAME[:KEY=VALUE,...]",
              help="recall, copy, reverse, sort, local-count, two-back, flip-flop, passkey or multi-needle, with "
              "parameters as in recall:queries=8. Default of those: what the model was trained with.")  # fmt: skip
@click.option("--harness", metavar="NAMES",
              help="Tests of lm-evaluation-harness instead, such as hellaswag,piqa.")  # fmt: skip
@click.option("--harness-tasks", metavar="DIR", help="Further tests for it: a folder of its YAML files.")
@click.option("--limit", metavar="NUMBER", help="Samples of each of its tests. Default: all.")
@click.option("--length", default="64", show_default=True, metavar="NUMBERS",
              help="Tokens of a sequence, such as 64:65536:x4.")  # fmt: skip
@click.option("--samples", default="200", show_default=True, metavar="NUMBER", help="Sequences a length.")
@click.option("--most-tokens", metavar="NUMBER",
              help="Fewer sequences of long texts: so many tokens a length.")  # fmt: skip
@click.option("--corpus", metavar="DIR", help="A corpus whose text surrounds a passkey or needle.")
@click.option("--chunk", metavar="TOKENS", help="Tokens that pass through the model at a time; 0 for whole texts.")
@click.option("--level", default="0.95", show_default=True, metavar="NUMBER", help="Confidence of each interval.")
@click.option("--device", default="cpu", show_default=True, metavar="NAME", help="cpu, cuda or cuda:N.")
@click.option("--dtype", default="float32", show_default=True, metavar="NAME",
              help="float32, bfloat16, float16 or auto.")  # fmt: skip
@click.option("--attention", metavar="NAME", help="transformers' implementation, such as sdpa or eager.")
@click.option("--rope-scaling", metavar="KIND:FACTOR",
              help="Stretch rotary positions, such as ntk:8 for our models, yarn:4 for others.")  # fmt: skip
@click.option("--trust-remote-code", is_flag=True, help="Let the model's folder run its own code.")
@click.option("--seed", default="0", show_default=True, metavar="INTEGER", help="Of the sequences.")
@click.option("--out", metavar="FILE", help="Write rows here after each length: .json, .csv or .parquet.")
@click.option("--format", "form", default="table", show_default=True, type=click.Choice(["table", "json", "csv"]),
              help="What goes to standard output.")  # fmt: skip
@click.option("--quiet", is_flag=True, help="No progress.")
def command(**options: Any) -> int:
    """Let a model take a test with right answers, and say how often it was right.

    MODEL is a folder of theory-lab train, or whatever theory-lab probe takes. An answer is right if greedy decoding
    gives exactly it. Accuracy is that of questions, with an interval that knows which of them share a text; a
    sequence is right if all of its answers are.

    \b
    theory-lab evaluate runs/recall-asentmax --task recall --length 64:4096:x4 --out recall.csv
    theory-lab evaluate runs/tda --task multi-needle:needles=4 --length 500:4000:+500 --samples 100
    theory-lab evaluate smollm2-135m --harness hellaswag,piqa --limit 500
    """
    import importlib.util

    spec = options["spec"]
    if (spec is None) == (options["harness"] is None):
        from theory_lab.tasks.registry import list_tasks

        raise InputError(
            "task", spec or "none", f"name one of {', '.join(list_tasks())}, or --harness: one of the two is allowed"
        )
    lengths = parse_wholes(options["length"], "length")
    samples = one_whole(options["samples"], "samples")
    seed = one_whole(options["seed"], "seed")
    level = one_number(options["level"], "level")
    chunk = None if options["chunk"] is None else one_whole(options["chunk"], "chunk")
    most = None if options["most_tokens"] is None else one_whole(options["most_tokens"], "most-tokens")
    if options["out"] is not None:
        _writer(options["out"])
        _claim(options["out"])
    if importlib.util.find_spec("torch") is None:
        raise InputError("evaluate", "torch is not installed", "pip install 'theory-lab[models]'")
    if spec is None:
        if options["rope_scaling"] is not None:
            raise InputError("rope-scaling", options["rope_scaling"], "it goes with --task")
        return _harness(options, level, seed)
    from theory_lab.probes.positions import scaled_positions
    from theory_lab.progress import make_progress
    from theory_lab.tasks.evaluation import evaluate
    from theory_lab.tasks.registry import parse_spec, task_class

    if options["rope_scaling"] is not None:
        from theory_lab.probes.positions import parse_scaling

        parse_scaling(options["rope_scaling"])
    for name in ("harness_tasks", "limit"):
        if options[name] is not None:
            raise InputError(name.replace("_", "-"), options[name], "it goes with --harness")
    task_class(parse_spec(spec)[0])
    model = _load(options)
    task = _task(spec, seed, model, options["corpus"])
    progress = make_progress(options["quiet"], "answering", "sequences")
    finished: list[TaskResult] = []

    def keep(result: TaskResult) -> None:
        finished[:] = [result]
        if options["out"] is not None:
            _write(result, options["out"])

    try:
        with scaled_positions(model.model, options["rope_scaling"]):
            result = evaluate(
                model,
                task,
                lengths,
                samples=samples,
                most_tokens=most,
                chunk=chunk,
                level=level,
                progress=progress,
                on_row=keep,
            )
    except (KeyboardInterrupt, TheoryLabError) as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        if not interrupted and not finished:
            raise
        progress.stop()
        fail("interrupted" if interrupted else str(error))
        if finished:
            _print(finished[0], options["form"])
            click.echo("what was finished is above; the rest was not measured", err=True)
        raise click.exceptions.Exit(EXIT_INTERRUPTED if interrupted else EXIT_USAGE) from None
    finally:
        progress.stop()
    _print(result, options["form"])
    return 0


def _load(options: dict[str, Any]) -> Any:
    from theory_lab.models import load_model

    return load_model(
        options["model"],
        device=options["device"],
        dtype=options["dtype"],
        attention=options["attention"],
        trust_remote_code=options["trust_remote_code"],
        quiet=options["quiet"],
    )


def _harness(options: dict[str, Any], level: float, seed: int) -> int:
    """Tests of lm-evaluation-harness."""
    from theory_lab.tasks.harness import run_harness

    names = [part.strip() for part in options["harness"].split(",") if part.strip()]
    limit = None if options["limit"] is None else one_whole(options["limit"], "limit")
    rows = run_harness(_load(options), names, limit=limit, include=options["harness_tasks"], level=level, seed=seed)
    if options["out"] is not None:
        from theory_lab.store import write_whole

        write_whole(options["out"], _writer(options["out"])(rows))
    if options["form"] == "table":
        from theory_lab.tasks.rendering import print_harness

        print_harness(rows, level)
    else:
        from theory_lab import render

        json_wanted = options["form"] == "json"
        click.echo(render.to_json(rows) if json_wanted else render.to_csv(rows), nl=json_wanted)
    return 0


def _task(spec: str, seed: int, model: Any, corpus: str | None) -> Any:
    from theory_lab.tasks.evaluation import trained_parameters
    from theory_lab.tasks.registry import get_task, parse_spec, task_class

    name, parameters = parse_spec(spec)
    if task_class(name).takes_text:
        # A model that learned the task from a corpus' text may have left the tokenizer there.
        own = model.tokenizer is not None or (corpus is None and "corpus" not in parameters)
        parameters = {"tokenizer": model if own else None, "corpus": corpus, **parameters}
    elif corpus is not None:
        raise InputError("corpus", corpus, f"task {name} takes none")
    return get_task(name, seed, **{**trained_parameters(model.folder, name), **parameters})


def _writer(path: str) -> Any:
    """How rows are written to a file of that name; InputError now if they cannot be."""
    from pathlib import Path

    from theory_lab import render

    suffix = Path(path).suffix.lower()
    if suffix == ".json":
        return lambda rows: render.to_json(rows).encode()
    if suffix == ".csv":
        return lambda rows: render.to_csv(rows).encode()
    if suffix == ".parquet":
        from theory_lab.store import require_pyarrow, rows_to_parquet

        require_pyarrow()
        return rows_to_parquet
    raise InputError("out", path, "a file that ends in .json, .csv or .parquet is allowed")


def _claim(path: str) -> None:
    """Find out now, not after the first length, that nothing can be written there."""
    import tempfile
    from pathlib import Path

    file = Path(path).absolute()
    try:
        if file.is_dir():
            raise IsADirectoryError(21, "Is a directory")
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".probe-"):
            pass
    except OSError as error:
        raise InputError("out", path, f"a file that can be written is allowed ({error.strerror or error})") from error


def _write(result: TaskResult, path: str) -> None:
    from theory_lab.store import write_whole

    write_whole(path, _writer(path)(result.rows))


def _print(result: TaskResult, form: str) -> None:
    from theory_lab import render

    if form == "json":
        click.echo(render.to_json(result.rows))
    elif form == "csv":
        click.echo(render.to_csv(result.rows), nl=False)
    else:
        from theory_lab.tasks.rendering import print_result

        print_result(result)
    if form != "table":
        for note in result.notes:
            click.echo(f"note: {note}", err=True)
    sys.stdout.flush()
