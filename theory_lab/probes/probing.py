"""Probe a trained model: the measures of every head, at any length, without an n x n map.

One forward pass of a causal model serves every length up to its own: the first T rows of a longer sequence are the
rows of the sequence of T tokens, so sums are read off as the rows pass by. (A model whose position code depends on the
length, and an encoder, run once a length.)
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from theory_lab.distributed.address import Scheduler, asked_scheduler, parse_memory
from theory_lab.distributed.probing import Asked, can_be_sent, check_place, measuring
from theory_lab.engine import validate_workers
from theory_lab.errors import InputError
from theory_lab.probes import running, texts
from theory_lab.probes.accumulate import GROUPS
from theory_lab.probes.cells import cells_of
from theory_lab.probes.keep import ProbeFolder
from theory_lab.probes.own import two_views
from theory_lab.probes.plan import DEFAULT_LENGTHS, DEFAULT_MODEL, NEAR_ZERO, SINK_EPS, Plan, ProbeResult
from theory_lab.probes.positions import check_length, scaled_positions
from theory_lab.probes.running import Run
from theory_lab.probes.texts import Text
from theory_lab.probes.whatif import Mechanism, parse_mechanism
from theory_lab.settings import Progress, Silent
from theory_lab.streams import validate_seed

if TYPE_CHECKING:
    from theory_lab.distributed.cluster import Cluster
    from theory_lab.models import LoadedModel


def probe(
    model: str | Path | LoadedModel = DEFAULT_MODEL,
    text: str | Text | Sequence[str | Text] | None = None,
    *,
    lengths: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    metrics: Sequence[str] | None = None,
    as_: str | Mechanism | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    windows: int = 1,
    seed: int = 0,
    near_zero: Sequence[float] = NEAR_ZERO,
    sink_keys: Sequence[int] = (1,),
    sink_eps: float = SINK_EPS,
    rope_scaling: str | None = None,
    attention: str | None = None,
    trust_remote_code: bool = False,
    out: str | Path | None = None,
    scheduler: str | Cluster | None = None,
    worker_memory: str | None = None,
    progress: Progress | None = None,
    on_partial: Callable[[ProbeResult], None] | None = None,
) -> ProbeResult:
    """Measure sinks, sparsity, entropy, maxima, survivors and scores of a model's attention.

    Parameters
    ----------
    model : str, path or LoadedModel
        As for :func:`theory_lab.models.load_model`.
    text : str, Text or a sequence of them, optional
        The words themselves (not a file's name: :func:`theory_lab.probes.texts.read_text` reads one). The shipped
        texts by default. Each must hold ``windows`` windows of the longest length.
    lengths : sequence of int, optional
        Sequence lengths T in tokens; 64, 128, ... 2048 by default, or what the model's positions allow of them.
    layers, heads : sequence of int, optional
        0-based; all by default.
    metrics : sequence of str, optional
        Of "sinks", "sparsity", "entropy", "maxima", "survivors", "scores". Without it all, and "scores" (moments of
        <q, k>, and the correlation of two views) where a mechanism has two views.
    as_ : str or Mechanism, optional
        Another mechanism's weights on the model's own queries and keys, such as "tra:beta=0.8" (see
        :mod:`theory_lab.probes.whatif`).
    device, dtype, attention, trust_remote_code
        As for ``load_model``; of no effect if a LoadedModel is given.
    windows : int
        Windows a text.
    seed : int
        Of the places of windows and of the bootstrap.
    near_zero : sequence of float
        Bounds of the near-zero rates.
    sink_keys : sequence of int
        1-based keys k of gSinkRatio(k) and of the sink rate.
    sink_eps : float
        Threshold of the sink rate.
    rope_scaling : str, optional
        "yarn:4", "linear:2" or "dynamic:4": scale the rotary positions, as transformers does it.
    out : path, optional
        Folder that keeps every finished window; a probe of the same things continues in it.
    scheduler : str or Cluster, optional
        Where windows are measured: "local", "local:2", or the address of a Dask scheduler such as "tcp://head:8786";
        here by default, or where the environment's THEORY_LAB_SCHEDULER says.
    worker_memory : str, optional
        Of each worker of a local scheduler, such as "4GiB".
    progress : Progress, optional
    on_partial : callable, optional
        Gets what is finished if the run ends early, before the error is raised.

    Returns
    -------
    ProbeResult

    Raises
    ------
    InputError
        Anything that cannot be measured as asked; found before anything runs, where that is possible.
    StoreError
        The folder cannot be written.
    WorkerError
        A worker or the scheduler is of no use, or is lost.

    Notes
    -----
    Out of memory, the layers finished so far are kept, and the run goes on with the shorter lengths.
    """
    progress = progress or Silent()
    mechanism = as_ if isinstance(as_, Mechanism) else parse_mechanism(as_)
    seed = validate_seed(seed)
    groups = _groups(metrics, mechanism)
    numbers = _checked_numbers(lengths, windows, near_zero, sink_keys, sink_eps)
    sources = checked_sources(text)
    place = _place(scheduler, worker_memory, device, model)
    with contextlib.ExitStack() as stack:
        cluster = None
        if place is not None and not (isinstance(place, Scheduler) and place.address is None):
            # That nothing answers there should show before a model is loaded.
            cluster = stack.enter_context(_opened(place, worker_memory, progress))
        began = time.monotonic()
        loaded = loaded_model(model, device, dtype, attention, trust_remote_code, progress)
        loading = time.monotonic() - began
        identity = "" if place is None else running.fingerprint(loaded.model)
        if metrics is None and mechanism.own and two_views(loaded.model):
            groups = GROUPS
        notes = [] if rope_scaling is None else [f"rotary positions are scaled: {rope_scaling}, by transformers"]
        scaled = stack.enter_context(scaled_positions(loaded.model, rope_scaling))
        most = scaled or loaded.max_positions
        default = [n for n in DEFAULT_LENGTHS if most is None or n <= most]
        plan = Plan(
            lengths=tuple(sorted(set(lengths))) if lengths else tuple(default),
            layers=checked_indices("layers", layers, loaded.layers),
            heads=checked_indices("heads", heads, loaded.heads),
            groups=groups,
            mechanism=mechanism,
            windows=windows,
            seed=seed,
            **numbers,
        )
        cells = cells_of(loaded, plan, sources)
        warning = check_length(loaded.model, plan.lengths[-1], most)
        if warning:
            progress.say(warning)
            notes.append(warning)
        elsewhere = None
        if place is not None:
            cluster = cluster or stack.enter_context(_opened(place, worker_memory, progress))
            threads, here = torch.get_num_threads(), os.getcwd()
            asked = Asked(
                str(model), identity, dtype, attention, rope_scaling, trust_remote_code, plan, threads, here
            )  # fmt: skip
            elsewhere = measuring(cluster, asked, loaded.model.num_parameters(), loading)
        # Last, so that bad input leaves no folder behind.
        folder = None if out is None else ProbeFolder(out)
        run = Run(loaded, plan, folder, progress, notes)
        try:
            return run.all(cells, elsewhere)
        except BaseException:
            if on_partial is not None and run.frames:
                on_partial(run.result(complete=False))
            raise


def _place(scheduler: str | Cluster | None, memory: str | None, device: str, model: Any) -> Scheduler | Cluster | None:
    """Where windows are measured, None for here; InputError for what cannot be measured there."""
    if scheduler is not None and not isinstance(scheduler, str):
        check_place(device, model)
        return scheduler
    asked = asked_scheduler(scheduler)
    if scheduler is not None:
        check_place(device, model)
    elif asked is not None and not can_be_sent(device, model):
        asked = None  # the environment speaks to commands that can follow it
    if asked is None and memory is not None:
        raise InputError("worker-memory", memory, "it needs a local scheduler: --scheduler local")
    if memory is not None:
        parse_memory(memory)
    return asked


@contextlib.contextmanager
def _opened(place: Scheduler | Cluster, memory: str | None, progress: Progress) -> Iterator[Cluster]:
    """Workers that measure probes; one that was given stays open."""
    if not isinstance(place, Scheduler):
        yield place
        return
    from theory_lab.distributed.cluster import Cluster
    from theory_lab.distributed.work import PROBES

    workers = None
    if place.address is None and place.workers is None:
        # Each computes with as many threads as this process would, so that the bits are the same.
        workers = max(1, validate_workers(None) // torch.get_num_threads())
    size = None if memory is None else parse_memory(memory)
    with Cluster(place, workers, size, progress.say, PROBES) as cluster:
        progress.say(cluster.describe())
        yield cluster


# ---- what was asked for ----------------------------------------------------------------------------------------------


def _groups(metrics: Sequence[str] | None, mechanism: Mechanism) -> tuple[str, ...]:
    if metrics is None:
        return tuple(g for g in GROUPS if g != "scores" or mechanism.name == "tda")
    for name in metrics:
        if name not in GROUPS:
            raise InputError("metrics", name, f"of {', '.join(GROUPS)}")
    if not metrics:
        raise InputError("metrics", "nothing", f"at least one of {', '.join(GROUPS)} is needed")
    return tuple(g for g in GROUPS if g in metrics)


def _checked_numbers(
    lengths: Sequence[int] | None,
    windows: int,
    near_zero: Sequence[float],
    sink_keys: Sequence[int],
    sink_eps: float,
) -> dict[str, Any]:
    for field_name, values in (("lengths", lengths or ()), ("sink_keys", sink_keys), ("windows", (windows,))):
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(field_name, value, "whole numbers of at least 1 are allowed")
    if lengths is not None and not lengths:
        raise InputError("lengths", "nothing", "at least one is needed")
    if not sink_keys:
        raise InputError("sink_keys", "nothing", "at least one is needed")
    for eps in near_zero:
        if not 0 < eps < 1:
            raise InputError("near_zero", eps, "numbers above 0 and below 1 are allowed")
    if not 0 <= sink_eps < 1:
        raise InputError("sink_eps", sink_eps, "a number from 0 to below 1 is allowed")
    return {"near_zero": tuple(near_zero), "sink_keys": tuple(sink_keys), "sink_eps": float(sink_eps)}


def checked_indices(name: str, chosen: Sequence[int] | None, count: int) -> tuple[int, ...]:
    """Chosen layers or heads, or all; InputError for one that is not there."""
    if chosen is None:
        return tuple(range(count))
    for value in chosen:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
            raise InputError(name, value, f"the model has {count}: 0 to {count - 1} are allowed")
    if not chosen:
        raise InputError(name, "nothing", "at least one is needed")
    return tuple(sorted(set(chosen)))


def checked_sources(text: str | Text | Sequence[str | Text] | None) -> list[Text]:
    """Texts with distinct names, the shipped ones if none is given; InputError for an empty one."""
    if text is None:
        return list(texts.shipped())
    given = [text] if isinstance(text, (str, Text)) else list(text)
    if not given:
        raise InputError("text", "nothing", "at least one text is needed")
    found: list[Text] = []
    for index, item in enumerate(given):
        name = "text" if len(given) == 1 else f"text {index + 1}"
        made = item if isinstance(item, Text) else texts.as_text(name, item)
        texts.as_text(made.name, made.content)
        if made.name in {other.name for other in found}:
            made = Text(f"{made.name} ({index + 1})", made.content)
        found.append(made)
    return found


def loaded_model(
    model: Any, device: str, dtype: str, attention: str | None, trust: bool, progress: Progress
) -> LoadedModel:
    """The model itself, or loaded by name; InputError if it cannot read text."""
    if hasattr(model, "model") and hasattr(model, "max_positions"):
        found = model
    else:
        from theory_lab.models import load_model

        found = load_model(
            model,
            device=device,
            dtype=dtype,
            attention=attention,
            trust_remote_code=trust,
            quiet=isinstance(progress, Silent),
        )
    if found.tokenizer is None:
        raise InputError("model", found.name, "it has no tokenizer, without which a text cannot be read")
    return found
