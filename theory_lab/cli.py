"""The command line: a thin layer that parses, calls and prints.

Importing this module must stay cheap: NumPy, pandas and rich are imported by the commands that use them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from theory_lab import __version__
from theory_lab.commands import Group
from theory_lab.commands.parsing import (
    EXIT_HOLDS,
    EXIT_INCONCLUSIVE,
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    EXIT_VIOLATED,
    fail,
    one_number,
    one_whole,
)
from theory_lab.ending import exit_code as ended_by
from theory_lab.ending import handle_termination
from theory_lab.errors import InputError, TheoryLabError
from theory_lab.grids import parse_budget, parse_numbers, parse_wholes
from theory_lab.outside import one_line

if TYPE_CHECKING:
    import pandas as pd

    from theory_lab.distributed.cluster import Cluster
    from theory_lab.experiments import Prepared, Progress, Settings
    from theory_lab.store import Store


def run() -> None:
    """Run the command line and exit; every error is one line on standard error."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller, who wants none of it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # for as long as the process lives
    handle_termination()
    code = execute()
    sys.exit(ended_by(code) if code == EXIT_INTERRUPTED else code)


def execute(words: list[str] | None = None) -> int:
    """Run one command line, ``sys.argv`` by default, and return its exit code; every error is one line."""
    try:
        code = command.main(words, prog_name="theory-lab", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        code = EXIT_USAGE
    except click.ClickException as error:
        fail(error.format_message())
        code = EXIT_USAGE
    except (click.Abort, KeyboardInterrupt):
        fail("interrupted")
        code = EXIT_INTERRUPTED
    except TheoryLabError as error:
        fail(str(error))
        code = error.exit_code
    except BrokenPipeError:
        # The reader (head, less) has seen enough. Python would complain again while flushing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except OSError as error:
        if error.filename is not None:  # a name that no check foresaw, such as one too long for the disk
            name = error.filename if isinstance(error.filename, str) else repr(error.filename)
            fail(f"file: {one_line(name, 200)}; it cannot be used ({error.strerror or error})")
            return EXIT_USAGE
        fail(f"standard output cannot be written ({error.strerror or error})")
        # Python would try to flush once more at exit, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = EXIT_USAGE
    except MemoryError:
        fail("out of memory: use fewer lengths or --workers 1")
        code = EXIT_USAGE
    except Exception as error:
        # A bug of ours. Users get a line; THEORY_LAB_DEBUG=1 gives whoever mends it the rest.
        if os.environ.get("THEORY_LAB_DEBUG"):
            raise
        fail(f"internal error ({type(error).__name__}: {error}); THEORY_LAB_DEBUG=1 shows where; please report it")
        code = EXIT_INTERNAL
    return code if isinstance(code, int) else 0


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="theory-lab")
def command() -> None:
    """Check what papers claim about attention mechanisms, with honest statistics.

    Start with: theory-lab check
    """


def _complete_claim(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    from theory_lab.catalog import CATALOG

    return [CompletionItem(s.id, help=s.bound_text) for s in CATALOG.values() if s.id.startswith(typed)]


def _complete_noise(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    from theory_lab.noise import ANY_LAW, family_names

    return [CompletionItem(name) for name in [*family_names(), ANY_LAW, "file:", "model:"] if name.startswith(typed)]


def _complete_paper(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    from theory_lab.audit import papers

    return [CompletionItem(name) for name in papers() if name.startswith(typed)]


def _grid(flag: str, help_text: str, **more: Any) -> Callable[[Any], Any]:
    return click.option(flag, multiple=True, metavar="NUMBERS", help=help_text, **more)


@command.command("check")
@click.argument("claims", nargs=-1, metavar="[CLAIM]...", shell_complete=_complete_claim)
@click.option(
    "--noise", multiple=True, metavar="FAMILY", shell_complete=_complete_noise,
    help="Noise family, such as gaussian, student-t:3, file:scores.npy, model:smollm2-135m (scores of its unrelated "
    "tokens), or 'any' for the worst law of all. "
    "Repeatable. Default: every family.",
)  # fmt: skip
@_grid("--length", "Visible keys n = i + 1, such as 1024 or 2:2^20:x4. Default: 2:2^30:x4.")
@_grid("--kappa", "Allowed expected number of survivors. Default: 1.")
@_grid("--beta", "Scale of the threshold. Default: 1.")
@_grid("--sigma", "Scale of the noise: its variance proxy is sigma^2/d. Default: 1.")
@_grid("--rho", "Correlation of the two views. Default: 0.")
@_grid("--key-rho", "Equicorrelation of the keys of a row. Default: 0.")
@_grid("--head-dim", "Head dimension d. Default: 64.")
@_grid("--lambda", "Weight of the second view, for claims about differences of views. Default: 0.5.")
@click.option("--trials", metavar="NUMBER", help="Rows a cell. Default: about a second's worth at most.")
@click.option("--estimator", default="auto", show_default=True, metavar="NAME",
              help="auto, direct, tail, importance, exact or worst-case.")  # fmt: skip
@click.option("--device", default="cpu", show_default=True, metavar="NAME",
              help="cpu, or cuda to draw every score on a GPU where it can.")  # fmt: skip
@click.option("--seed", default="0", show_default=True, metavar="INTEGER", help="Same seed, same bits.")
@click.option("--alpha", default="1e-3", show_default=True, metavar="NUMBER",
              help="Probability that any verdict of the run is wrong.")  # fmt: skip
@click.option("--tolerance", default="0.01", show_default=True, metavar="NUMBER",
              help="HOLDS needs an upper end of at most (1 + tolerance) x bound.")  # fmt: skip
@click.option("--bound-scale", default="1", show_default=True, metavar="NUMBER",
              help="Factor on every bound: would a stronger claim hold?")  # fmt: skip
@click.option("--budget", metavar="TIME|TRIALS",
              help="Draw until every cell is decided or this is spent: 30s, 5m, 1e9.")  # fmt: skip
@click.option("--workers", metavar="NUMBER", help="Worker processes. Default: one a core.")
@click.option("--scheduler", metavar="ADDRESS",
              help="Run cells on Dask workers: local, local:N, or tcp://HOST:PORT of a scheduler. Default: "
              "$THEORY_LAB_SCHEDULER, else worker processes without Dask.")  # fmt: skip
@click.option("--worker-memory", metavar="SIZE",
              help="Memory of a worker of a local scheduler, such as 2GiB. Default: its part of all.")  # fmt: skip
@click.option("--plan", is_flag=True,
              help="Draw nothing: say how many cells and draws it is, how long, at what price.")  # fmt: skip
@click.option("--price-per-hour", metavar="NUMBER", help="Of a worker, for --plan.")
@click.option("--out", metavar="DIR", help="Keep results in this folder.")
@click.option("--resume", is_flag=True, help="Continue or extend the results in --out.")
@click.option("--format", "form", default="table", show_default=True,
              type=click.Choice(["table", "json", "csv", "parquet"]), help="What goes to standard output.")  # fmt: skip
@click.option("--full", is_flag=True, help="Print every row of the table, however many.")
@click.option("--plot", metavar="FILE", help="Draw estimate, interval, exact value and bound (.png, .pdf, .svg).")
@click.option("--controls-ok", is_flag=True,
              help="Rows outside a claim's assumptions (negative controls) do not affect the exit code.")  # fmt: skip
@click.option("--quiet", is_flag=True, help="No progress.")
def check_command(**options: Any) -> int:
    """Check claims by simulation.

    With no CLAIM, all of them over every noise family, with lengths from 2 to 2^30; given grid options such as
    --length, those claims that depend on all of them.

    Exit code: 0 all hold, 1 any violated, 3 none violated but some inconclusive, 2 bad usage.

    \b
    theory-lab check
    theory-lab check tda-4.3 --noise gaussian --length 2:2^20:x4
    theory-lab check tda-4.6 --noise gaussian --length 10^4 --rho 0,0.3,0.5
    theory-lab check tda-4.3 --noise file:scores.npy,raw --head-dim 64
    """
    settings = _settings(options)
    from theory_lab.engine import validate_workers

    workers = None if options["workers"] is None else one_whole(options["workers"], "workers")
    validate_workers(workers)
    if options["resume"] and options["out"] is None:
        raise InputError("resume", "without --out", "name the folder to continue with --out DIR")
    _check_outputs(options)
    from theory_lab.experiments import open_cluster, prepare
    from theory_lab.progress import make_progress

    prepared = prepare(settings)  # what is impossible must not leave anything on disk
    if options["plan"]:
        return _plan(settings, options, workers)
    if options["price_per_hour"] is not None:
        raise InputError("price-per-hour", options["price_per_hour"], "it belongs to --plan")
    progress = make_progress(options["quiet"])
    with open_cluster(options["scheduler"], workers, options["worker_memory"], progress.say) as cluster:
        store = _open_store(options)
        rows = _run(settings, prepared, options, store, None if cluster else workers, cluster, progress)
    _print_rows(rows, options, settings)
    if options["plot"]:
        from theory_lab.figures.check_plot import plot_check

        plot_check(rows, options["plot"])
        click.echo(f"picture: {options['plot']}", err=True)
    return exit_code(rows, options["controls_ok"])


def _plan(settings: Settings, options: dict[str, Any], workers: int | None) -> int:
    """Print what the run would take."""
    from theory_lab.distributed.address import asked_scheduler
    from theory_lab.distributed.plan import plan_run, seconds_since_start, show
    from theory_lab.engine import validate_workers

    if options["form"] not in ("table", "json"):
        raise InputError("format", options["form"], "a plan is printed as table or json")
    price = options["price_per_hour"]
    price = None if price is None else one_number(price, "price-per-hour")
    if price is not None and not 0 <= price < float("inf"):
        raise InputError("price-per-hour", options["price_per_hour"], "a number from 0 on is allowed")
    asked = asked_scheduler(options["scheduler"])
    if asked is not None and asked.workers is not None and workers is None:
        workers = asked.workers
    store = _open_store(options) if options["resume"] else None
    found = plan_run(
        settings,
        validate_workers(workers),
        price_per_hour=price,
        store=store,
        keep=options["out"] is not None,
        started=seconds_since_start(),
    )
    if options["form"] == "json":
        import json

        click.echo(json.dumps(found.describe()))
    else:
        click.echo(show(found))
    return EXIT_HOLDS


def _run(
    settings: Settings,
    prepared: Prepared,
    options: dict[str, Any],
    store: Store | None,
    workers: int | None,
    cluster: Cluster | None,
    progress: Progress,
) -> pd.DataFrame:
    """The rows; if the run ends early, what is finished is printed, with how to go on."""
    from theory_lab.experiments import run

    partial: list[pd.DataFrame] = []
    try:
        return run(
            settings,
            prepared=prepared,
            store=store,
            workers=workers,
            elsewhere=cluster,
            progress=progress,
            on_partial=partial.append,
        )
    except (KeyboardInterrupt, TheoryLabError) as error:
        _salvage(error, partial, store, options, settings)
        raise click.exceptions.Exit(EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_USAGE) from None


def exit_code(rows: pd.DataFrame, controls_ok: bool = False) -> int:
    """0 if all rows hold, 1 if any is violated, 3 if none is but some are inconclusive."""
    counted = rows[rows.assumptions == "met"] if controls_ok else rows
    if (counted.verdict == "VIOLATED").any():
        return EXIT_VIOLATED
    return EXIT_INCONCLUSIVE if (counted.verdict == "INCONCLUSIVE").any() else EXIT_HOLDS


def _settings(options: dict[str, Any]) -> Settings:
    """Parse what was typed; nothing heavy is imported until the numbers make sense."""
    grids: dict[str, tuple[Any, ...]] = {}
    for name in ("length", "kappa", "beta", "sigma", "rho", "key_rho", "lambda", "head_dim"):
        parse = parse_wholes if name in ("length", "head_dim") else parse_numbers
        values = [value for text in options[name] for value in parse(text, name)]
        if values:
            grids["lam" if name == "lambda" else name] = tuple(values)
    budget = None if options["budget"] is None else parse_budget(options["budget"])
    trials = None if options["trials"] is None else one_whole(options["trials"], "trials")
    from theory_lab.experiments import Budget, Settings

    return Settings(
        claims=tuple(options["claims"]),
        noise=tuple(options["noise"]) or None,
        **grids,
        trials=trials,
        estimator=options["estimator"],
        device=options["device"],
        seed=one_whole(options["seed"], "seed"),
        alpha=one_number(options["alpha"], "alpha"),
        tolerance=one_number(options["tolerance"], "tolerance"),
        bound_scale=one_number(options["bound_scale"], "bound-scale"),
        budget=None if budget is None else Budget(*budget),
    )


def _check_outputs(options: dict[str, Any]) -> None:
    """Find out now, not after the run, that what was asked for cannot be written."""
    if options["form"] == "parquet":
        if sys.stdout.isatty():
            raise InputError("format", "parquet", "redirect it to a file: theory-lab check --format parquet > FILE")
        from theory_lab.store import require_pyarrow

        require_pyarrow()
    if options["plot"]:
        from theory_lab.figures.check_plot import validate_plot_file

        validate_plot_file(options["plot"])


def _open_store(options: dict[str, Any]) -> Store | None:
    if options["out"] is None:
        return None
    from theory_lab.store import Store

    return Store(options["out"], options["resume"])


def _salvage(
    error: BaseException, partial: list[pd.DataFrame], store: Store | None, options: dict[str, Any], settings: Settings
) -> None:
    """Print what is finished, and say how to go on."""
    if isinstance(error, KeyboardInterrupt):
        fail("interrupted")
    else:
        fail(str(error))
    if partial and len(partial[0]):
        _print_rows(partial[0], options, settings)
        click.echo(f"complete rows above: {len(partial[0])}; the rest was not drawn", err=True)
    if store is not None:
        words = [w for w in sys.argv[1:] if w != "--resume"]
        import shlex

        click.echo(
            f"{store.cell_count()} finished cells are in {store.path}; continue with: "
            f"theory-lab {shlex.join(words)} --resume",
            err=True,
        )
    elif isinstance(error, KeyboardInterrupt):
        click.echo("with --out DIR finished cells are kept and --resume continues", err=True)


def _print_rows(rows: pd.DataFrame, options: dict[str, Any], settings: Settings) -> None:
    from theory_lab import render

    if options["form"] == "table":
        render.print_table(rows, settings, full=options["full"])
    elif options["form"] == "json":
        click.echo(render.to_json(rows))
    elif options["form"] == "csv":
        click.echo(render.to_csv(rows), nl=False)
    else:
        from theory_lab.store import rows_to_parquet

        sys.stdout.buffer.write(rows_to_parquet(rows))
        sys.stdout.buffer.flush()


@command.command("claims")
@click.argument("claim", required=False, shell_complete=_complete_claim)
def claims_command(claim: str | None) -> None:
    """List the claims, or print one in full."""
    from theory_lab import render
    from theory_lab.catalog import CATALOG, find

    if claim is None:
        render.print_claims(list(CATALOG.values()))
    else:
        render.print_claim(find(claim))


@command.command("noise")
@click.argument("family", required=False, shell_complete=_complete_noise)
def noise_command(family: str | None) -> None:
    """List the noise families, or measure one: variance, proxy and tails, scaled to sigma = 1 and d = 64."""
    from theory_lab import render
    from theory_lab.noise import ANY_LAW, get_family, list_families

    if family is None:
        render.print_families(list_families())
    elif family == ANY_LAW:
        click.echo(
            "any: every law with mean 0 and the proxy; theory-lab check tda-4.3 --noise any bounds the worst one"
        )
    else:
        render.print_family(get_family(family))


@command.command("audit")
@click.argument("papers", nargs=-1, metavar="[PAPER]...", shell_complete=_complete_paper)
@click.option("--format", "form", default="table", show_default=True,
              type=click.Choice(["table", "json", "csv"]), help="What goes to standard output.")  # fmt: skip
def audit_command(papers: tuple[str, ...], form: str) -> int:
    """Hold a paper's own tables against its statements and against measurements.

    With no PAPER (tda, asentmax, eta), all of them.

    Exit code: 0 nothing contradicts, 1 something does, 2 bad usage.
    """
    import pandas as pd

    from theory_lab import audit, render

    names = list(dict.fromkeys(papers)) or audit.papers()
    for name in names:
        audit.load(name)  # a wrong name or broken data is found before anything is measured
    frames = []
    for name in names:
        click.echo(f"theory-lab: auditing {name}, with the checks that its statements ask for", err=True)
        frames.append(audit.audit(name))
    frame = pd.concat(frames)
    if form == "table":
        from theory_lab.render_audit import print_audit

        print_audit(frame)
    elif form == "json":
        click.echo(render.to_json(frame))
    else:
        click.echo(render.to_csv(frame), nl=False)
    return EXIT_VIOLATED if (frame["verdict"] == "CONTRADICTS").any() else EXIT_HOLDS


@command.command("phase")
@click.option("--rows", metavar="NUMBER", help="Rows a cell. Default: 64, fewer for long ones.")
@click.option("--seed", default="0", show_default=True, metavar="INTEGER", help="Same seed, same bits.")
@click.option("--workers", metavar="NUMBER", help="Worker processes. Default: one a core.")
@click.option("--plot", metavar="FILE", help="Draw the diagram (.png, .pdf, .svg).")
@click.option("--out", metavar="FILE", help="Write the numbers (.csv or .parquet) instead of printing them.")
def phase_command(rows: str | None, seed: str, workers: str | None, plot: str | None, out: str | None) -> int:
    """Map where each mechanism disperses: entropy over score law, scale and length.

    Prints CSV: one line a cell, normalized entropy E[H] / log n with its standard error.
    """
    from theory_lab import render
    from theory_lab.engine import validate_workers

    if plot:
        from theory_lab.figures.check_plot import validate_plot_file

        validate_plot_file(plot)
    if out is not None and not out.endswith((".csv", ".parquet")):
        raise InputError("out", out, "a file name ending in .csv or .parquet is allowed")
    from theory_lab.phase import phase_diagram

    frame = phase_diagram(
        rows=None if rows is None else one_whole(rows, "rows"),
        seed=one_whole(seed, "seed"),
        workers=validate_workers(None if workers is None else one_whole(workers, "workers")),
    )
    if plot:
        from theory_lab.figures.phase_plot import plot_phase

        plot_phase(frame, plot)
        click.echo(f"picture: {plot}", err=True)
    if out is None:
        click.echo(render.to_csv(frame), nl=False)
    else:
        from theory_lab.store import rows_to_parquet, write_whole

        write_whole(out, rows_to_parquet(frame) if out.endswith(".parquet") else render.to_csv(frame).encode())
    return EXIT_HOLDS


@command.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> None:
    """Print a completion script: eval "$(theory-lab completion bash)"."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None  # the choices above are click's own
    click.echo(kind(command, {}, "theory-lab", "_THEORY_LAB_COMPLETE").source())
