"""Targets that read words: numbers and names as people type them, and every command with every option."""

from __future__ import annotations

import contextlib
import functools
import io
import random
import re
import sys
from collections.abc import Callable
from typing import Any

import click
import fuzz_inputs as make
from fuzz_harness import Place, Target

# parsers

_PARSERS: tuple[str, ...] = (
    "grids:parse_number", "grids:parse_numbers", "grids:parse_wholes", "grids:parse_budget", "commands.parsing:one_whole",
    "commands.parsing:one_number", "commands.parsing:named", "commands.parsing:pairs", "probes.whatif:parse_mechanism",
    "noise:get_family", "noise.model_scores:parse_model", "tasks.registry:parse_spec", "probes.positions:parse_scaling",
    "models.catalog:find_model", "catalog:find", "models.lab.sizes:get_size", "tasks.registry:task_class",
)  # fmt: skip


@functools.cache
def _parser(name: str) -> Callable[..., Any] | None:
    import importlib
    import inspect

    module, _, attribute = name.partition(":")
    found = getattr(importlib.import_module(f"theory_lab.{module}"), attribute, None)
    if found is None:
        return None
    found = getattr(found, "__wrapped__", found)  # without a cache that would grow for ever
    needs_field = "field" in inspect.signature(found).parameters
    return (lambda text: found(text, "field")) if needs_field else found


def _make_text(rng: random.Random) -> list[str]:
    text = make.word(rng)
    if rng.random() < 0.3:
        text = rng.choice((",", ":", "x", "^", "=", "(", ")")).join(
            make.word(rng)[:50] for _ in range(rng.randrange(2, 5))
        )
    return [rng.choice(_PARSERS), text]


def _parse(value: list[str], place: Place) -> None:
    parser = _parser(value[0])
    if parser is not None:
        with _stubbed("_measure", "_from_hub"):  # minutes of work, and a connection: both legitimate wishes
            parser(value[1])


def _make_task(rng: random.Random) -> list[str]:
    from theory_lab.tasks.registry import _BUILTIN, task_class

    name = rng.choice(list(_BUILTIN))
    import inspect

    keys = [key for key in inspect.signature(task_class(name)).parameters if key != "seed"]
    numbers = ["0", "1", "2", "8", "64", "-1", "1e9", "0.5", "nan", "1e308", str(2**31), str(2**63), *make.WORDS[:60]]
    given = [f"{rng.choice(keys)}={rng.choice(numbers)[:60]}" for _ in range(rng.randrange(1, 4))]
    return [name + ":" + ",".join(given), rng.choice(("16", "64", "3", "0", "1000"))]


def _task(value: list[str], place: Place) -> None:
    from theory_lab.tasks.registry import open_source

    source = open_source(value[0])
    source.batch(0, 2, int(value[1]))


# the command line


def _leaves(command: click.Command, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], click.Command]]:
    if not isinstance(command, click.Group):
        return [(path, command)]
    context = click.Context(command)
    found = [(path, command)] if path and command.invoke_without_command else []
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        assert inner is not None
        found += _leaves(inner, (*path, name))
    return found


#: Values that options and arguments are made for, by name.
_GOOD: dict[str, tuple[str, ...]] = {
    "claims": ("tda-4.3", "tda-4.6", "tra-dispersion", "asentmax-theta", "eta-block-bound"), "claim": ("tda-4.3",),
    "family": ("gaussian", "student-t:3", "any"), "noise": ("gaussian", "student-t:3", "any", "two-point"), "papers": ("tda", "eta"),
    "length": ("64", "2,64", "2:2^10:x4"), "rho": ("0", "0.3"), "key_rho": ("0", "0.5"), "model": ("softmax-pico",), "name": ("softmax-pico",),
    "budget": ("1s", "1e6"), "text": ("-", "book.txt"), "texts": ("book.txt",), "plan": ("language", "plan.toml"), "names": ("tda", "tda.table-1"),
    "spec": ("recall:queries=2", "copy"), "corpus": ("corpus",), "results": ("rows.json",), "store": ("store",), "sources": ("book.txt",),
    "as_": ("tra:beta=0.8",), "metrics": ("sinks", "entropy"), "preset": ("tda.small",), "attention": ("tda:beta=0.8", "sdpa"),
    "size": ("pico", "quick"), "task": ("recall:queries=2",), "devices": ("cpu",), "device": ("cpu", "cuda"), "dtype": ("float32", "auto"),
    "estimator": ("tail", "exact", "direct"), "rope_scaling": ("linear:2", "ntk:2"), "forms": ("png", "svg,csv"), "only": ("TDA",),
    "what": ("tda-4.3",), "packages": ("python3-doc",), "near_zero": ("1e-6,1e-3",), "worker_memory": ("1GiB",), "error": ("damaged",),
}  # fmt: skip
#: Options that name what is written: a user's own choice, kept inside the output folder here.
_WRITTEN = {"out", "plot", "html", "md", "latex", "into", "folder", "to", "json_file", "target"}
#: Options that leave the machine, or start what does; the guard would see it.
_LEFT_OUT = {"browser", "scheduler"}


@functools.cache
def _commands() -> tuple[tuple[tuple[str, ...], tuple[tuple[str, str, tuple[str, ...] | None], ...]], ...]:
    from theory_lab.cli import command

    found = []
    for path, leaf in _leaves(command):
        options = []
        for parameter in leaf.params:
            name = str(parameter.name)
            if name in _LEFT_OUT:
                continue
            flag = parameter.opts[0] if isinstance(parameter, click.Option) else ""
            if isinstance(parameter, click.Option) and parameter.is_flag:
                options += [(one, name, None) for one in (*parameter.opts, *parameter.secondary_opts)]
                continue
            good = _GOOD.get(name, ("1", "2", "0.5"))
            if isinstance(parameter.type, click.Choice):
                good = tuple(map(str, parameter.type.choices))
            if name in _WRITTEN:
                good = {"plot": ("p.png", "p.svg"), "html": ("r.html",), "md": ("r.md",), "latex": ("r.tex",)}.get(
                    name, ("o.csv", "o", "o.json")
                )
            options.append((flag, name, good))
        found.append((path, tuple(options)))
    return tuple(found)


def _make_line(rng: random.Random) -> list[str]:
    path, options = rng.choice(_commands())
    if rng.random() < 0.03:
        return [make.word(rng).replace("\0", "") for _ in range(rng.randrange(4))]
    line = list(path)
    # Needed arguments are given most of the time, so that what comes after them is reached.
    for flag, name, good in options:
        if not flag and good is not None and rng.random() < 0.85:
            line.append(_kept(rng.choice(good) if rng.random() < 0.6 else make.word(rng), name))
    if path in (("corpus", "build"), ("campaign", "run"), ("campaign", "gather")) and rng.random() < 0.9:
        line += ["--out", "made"]
    for _ in range(rng.choice((0, 1, 1, 2, 3, 5))):
        flags = [one for one in options if one[0]]
        if not flags:
            break
        flag, name, good = rng.choice(flags)
        if good is None:
            line.append(flag)
        else:
            text = _kept(rng.choice(good) if rng.random() < 0.5 else make.word(rng), name)
            line += [flag, text] if rng.random() < 0.85 else [f"{flag}={text}"]
    return line


def _kept(text: str, name: str) -> str:
    """A word as it may be given to a program; one that names what is written stays in the output folder."""
    # Words of a program are bytes: no zeros, and of half pairs those alone that stand for a byte.
    text = text.replace("\0", "").encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")
    if name in _WRITTEN:
        return re.sub(r"^[/~.]+|\.\.", "", text)
    # A source of "/" is a legitimate wish, and takes a while.
    return "book.txt" if name == "sources" and text.strip() in ("/", "~", ".", "..", "") else text


def _refuse(what: str) -> Callable[..., Any]:
    def work(*_: Any, **__: Any) -> Any:
        from theory_lab.errors import InputError

        raise InputError(what, "is not done here", "what is fuzzed is how it is asked for")

    return work


def _nothing(*_: Any, **__: Any) -> Any:
    import pandas as pd

    from theory_lab.experiments import COLUMNS

    return pd.DataFrame(columns=list(COLUMNS))


@functools.cache
def _stubs() -> tuple[tuple[Any, str, Any], ...]:
    """What stands in the place of the work itself, so that how it is asked for can be fuzzed."""
    import importlib

    named = (
        ("audit", "audit", "audit"), ("phase", "_one", "phase"), ("phase", "worker_pool", "phase"),
        ("noise.model_scores", "_measure", "scores"), ("models.fetching", "_download", "download"), ("models.loading", "_from_hub", "the Hub"), ("training", "train", "training"),
        ("campaigns.work", "_pool", "pool"), ("reproduce.run", "_one", "drawing"), ("corpus.building", "build_corpus", "corpus"),
        ("selftest", "run_selftest", "self-test"), ("distributed.plan", "worker_pool", "plan"),
        ("distributed.plan", "calibrate", "plan"), ("explore.server", "serve", "server"),
    )  # fmt: skip
    found = [(importlib.import_module("theory_lab.experiments"), "run", _nothing)]
    for module, name, what in named:
        found.append((importlib.import_module(f"theory_lab.{module}"), name, _refuse(what)))
    for module in ("calibration", "probes.probing", "probes.unrelated", "probes.capturing", "tasks.evaluation"):
        importlib.import_module(f"theory_lab.{module}")
    for one in list(sys.modules.values()):
        if getattr(one, "__name__", "").startswith("theory_lab") and "load_model" in vars(one):
            found.append((one, "load_model", _refuse("model")))
    import theory_lab.models

    return (*found, (theory_lab.models, "load_model", _refuse("model")))


@contextlib.contextmanager
def _stubbed(*only: str) -> Any:
    """The stubs in place, for a while."""
    chosen = [stub for stub in _stubs() if not only or stub[1] in only]
    before = [(module, name, getattr(module, name)) for module, name, _ in chosen]
    for module, name, made in chosen:
        setattr(module, name, made)
    try:
        yield
    finally:
        for module, name, was in before:
            setattr(module, name, was)


def _line(words: list[str], place: Place) -> str | None:
    from theory_lab.cli import command
    from theory_lab.commands.parsing import EXIT_VIOLATED

    (place.out / "book.txt").write_text("A book.\n\nWith words.\n" * 40, encoding="utf-8")
    (place.out / "plan.toml").write_text('[train]\ntask = "recall"\n[runs.TDA]\nattention = "tda"\n', encoding="utf-8")
    (place.out / "rows.json").write_text("[]", encoding="utf-8")
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
    kept = sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(b"Some words.\n" * 100), "utf-8")
    try:
        with _stubbed(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = command.main(list(words), prog_name="theory-lab", standalone_mode=False)
    except OSError as error:
        if error.filename is None:
            raise
        raise click.ClickException(f"file: {str(error.filename)!r:.200}; {error.strerror}") from None  # as it is shown
    except click.ClickException as error:
        from theory_lab.outside import one_line

        raise click.ClickException(one_line(error.format_message(), 2000)) from None  # as it is shown
    finally:
        sys.stdin = kept
        out.flush()
        err.flush()
        shown = out.buffer.getvalue() + err.buffer.getvalue()  # type: ignore[attr-defined]
        assert b"\x1b" not in shown, "an escape sequence is printed"
        assert b"\x9b" not in shown.replace("\u005b".encode(), b"") or b"\xc2\x9b" not in shown, (
            "a control character is printed"
        )
    assert code is None or code in (0, EXIT_VIOLATED, 2, 3), f"exit code {code}"
    return None


TARGETS = (
    Target("words", _make_text, _parse, 447, heavy=True),
    Target("tasks", _make_task, _task, 130, heavy=True),
    Target("command-line", _make_line, _line, 4, heavy=True, settled=600),
)
