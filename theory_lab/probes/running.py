"""Running a probe: forward passes, what they leave behind, and what happens when one does not fit."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from theory_lab.errors import InputError
from theory_lab.probes import measures, own
from theory_lab.probes.accumulate import HeadSums, head_measures, parts_needed, stack, unpack
from theory_lab.probes.cells import Cell, work_of
from theory_lab.probes.keep import ProbeFolder
from theory_lab.probes.plan import Plan, ProbeResult
from theory_lab.probes.replay import Replays
from theory_lab.probes.shares import key_shares
from theory_lab.probes.texts import Window
from theory_lab.settings import Progress
from theory_lab.streams import cell_digest

if TYPE_CHECKING:
    import pandas as pd

    from theory_lab.models import LoadedModel

#: Changes when, and only when, the same settings would give other rows.
_VERSION = 3


class OutOfMemory(Exception):
    """A forward pass did not fit; its finished layers are kept."""


@dataclass(frozen=True)
class Part:
    """What one cell left behind.

    Attributes
    ----------
    frames : tuple of DataFrame
        Rows; several where it did not fit as a whole.
    notes : tuple of str
    unseen : tuple of str
    whole : bool
        Whether everything of it was measured at once.
    """

    frames: tuple[pd.DataFrame, ...]
    notes: tuple[str, ...]
    unseen: tuple[str, ...]
    whole: bool


#: Measures cells somewhere else, and says of each, as it is finished, what it left behind.
Elsewhere = Callable[[Sequence[Cell]], Iterator[tuple[int, Part]]]


@dataclass
class Run:
    """The state of a probe: what is finished, and what is left to say."""

    loaded: LoadedModel
    plan: Plan
    folder: ProbeFolder | None
    progress: Progress
    notes: list[str]
    unseen: tuple[str, ...] = ()
    complete: bool = True
    _frames: dict[int, list[pd.DataFrame]] = field(default_factory=dict)
    _at: int = 0
    _watched: Watched | None = None
    _replays: Replays = field(default_factory=Replays)

    @property
    def frames(self) -> list[pd.DataFrame]:
        """Rows that are finished, in the order of the cells."""
        return [frame for index in sorted(self._frames) for frame in self._frames[index]]

    def all(self, cells: Sequence[Cell], elsewhere: Elsewhere | None = None) -> ProbeResult:
        """Every cell, from the folder or measured, here or elsewhere."""
        digests = [self._digest(cell) for cell in cells] if self.folder else [""] * len(cells)
        for index, digest in enumerate(digests):
            rows = self.folder.load(digest) if self.folder else None
            if rows is not None:
                self._frames[index] = [rows]
        missing = [index for index in range(len(cells)) if index not in self._frames]
        self.progress.start(len(cells), len(cells) - len(missing), sum(work_of(cells[index]) for index in missing))
        try:
            if elsewhere is not None and missing:
                self._release()
                for place, part in elsewhere([cells[index] for index in missing]):
                    index = missing[place]
                    self._take(index, part)
                    self._save(digests[index], part.frames[0] if part.whole else None)
                    self.progress.advance(1, work_of(cells[index]))
            elif missing:
                # One watch for the whole run: a watch checks each layer's first call, which costs.
                with self.watching() as seen:
                    for self._at in missing:
                        rows = self._measure(cells[self._at], seen)
                        self._save(digests[self._at], rows)
                        self.progress.advance(1, 0.0)
        finally:
            self.progress.stop()
        if not self.frames:
            raise InputError("length", self.plan.lengths[-1], self.notes[-1])
        result = self.result(self.complete)
        if self.folder is not None:
            asked = {"seed": self.plan.seed, "sink_eps": self.plan.sink_eps, "windows": self.plan.windows}
            self.folder.finish(result.rows, result.summary(), {**self._about(), "settings": asked})
        return result

    def watching(self) -> AbstractContextManager[Any]:
        """The model's layers, shown to whatever is measured."""
        from theory_lab.probes.watching import watch

        layers = None if len(self.plan.layers) == self.loaded.layers else self.plan.layers
        return watch(self.loaded.model, self._observe, layers=layers)

    def alone(self, cell: Cell, seen: Any) -> Part:
        """One cell, apart from all that was measured before."""
        self._frames, self._at, self.notes, self.unseen = {}, 0, [], ()
        rows = self._measure(cell, seen)
        return Part(tuple(self.frames), tuple(self.notes), self.unseen, rows is not None)

    def _release(self) -> None:
        """Let go of weights that are not needed here; everything that is said of the model is known by now."""
        self._about()
        self.loaded.model.to(torch.device("meta"))  # type: ignore[arg-type]  # transformers' decorator hides its types

    def _take(self, index: int, part: Part) -> None:
        """What a cell left behind elsewhere; what was said of others before is not said again."""
        if part.frames:
            self._frames[index] = list(part.frames)
        self.unseen = self.unseen or part.unseen
        self.complete = self.complete and part.whole
        for note in part.notes:
            if note not in self.notes:
                self.progress.say(note)
                self.notes.append(note)

    def _save(self, digest: str, rows: pd.DataFrame | None) -> None:
        if self.folder is not None and rows is not None:
            self.folder.save(digest, rows, self._about())

    def result(self, complete: bool) -> ProbeResult:
        """What is finished, as a result."""
        import pandas as pd

        rows = pd.concat(self.frames, ignore_index=True)
        rows = rows[rows["head"].isin(self.plan.heads)].reset_index(drop=True)
        return ProbeResult(rows, self.plan, self.loaded.name, self.unseen, tuple(self.notes), complete)

    def _measure(self, cell: Cell, seen: Any) -> pd.DataFrame | None:
        """One cell, its rows; where it does not fit, its finished layers and what shorter lengths give, and None."""
        lengths = cell.lengths
        while lengths:
            work = work_of(cell) / max(len(self.plan.layers), 1)
            watched = Watched(self.plan, lengths, self.progress, work, self._replays)
            try:
                self._forward(cell.window.ids[: lengths[-1]], watched, seen)
            except OutOfMemory as error:
                self._shrink(cell, lengths, watched, error)
                lengths = lengths[:-1]
                continue
            except BaseException:
                self._keep(watched.frame(cell.window, self.loaded.name))
                raise
            rows = watched.frame(cell.window, self.loaded.name)
            self._keep(rows)
            return rows if lengths == cell.lengths else None
        return None

    def _keep(self, rows: pd.DataFrame | None) -> None:
        if rows is not None:
            self._frames.setdefault(self._at, []).append(rows)

    def _shrink(self, cell: Cell, lengths: tuple[int, ...], watched: Watched, error: OutOfMemory) -> None:
        self.complete = False
        self._replays = Replays()  # recordings keep memory
        rows = watched.frame(cell.window, self.loaded.name)
        done = 0
        if rows is not None:
            # Shorter lengths are measured again, whole.
            rows = rows[rows.length == lengths[-1]]
            done = rows.layer.nunique()
            self._keep(rows)
        shorter = f"; going on with {lengths[-2]:,}" if len(lengths) > 1 else ""
        text = (
            f"out of memory at length {lengths[-1]:,} in text '{cell.window.text}': {done} of {len(self.plan.layers)} "
            f"layers are kept{shorter}. A shorter --length, --dtype bfloat16 or fewer --metrics needs less ({error})"
        )
        self.progress.say(text)
        self.notes.append(text)

    def _observe(self, call: Any) -> None:
        assert self._watched is not None
        self._watched(call)

    def _forward(self, ids: Sequence[int], watched: Watched, seen: Any) -> None:
        self._watched = watched
        try:
            # Not inference mode: masks made in it are read again by every layer.
            with torch.no_grad():
                run_backbone(self.loaded, ids)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise OutOfMemory(_line(error)) from None
        except RuntimeError as error:
            if "alloc" in str(error).lower() and "memory" in str(error).lower():
                raise OutOfMemory(_line(error)) from None
            raise
        self._name_unseen(seen)

    def _name_unseen(self, seen: Any) -> None:
        """Say once which layers could not be watched, and why; InputError if that is all of them."""
        from theory_lab.probes.watching import spans

        missing = seen.unseen
        if not seen.seen:
            seen.check()
        if missing and not self.unseen:
            self.unseen = tuple(f"{layer}" for layer in missing)
            reasons = "; ".join(dict.fromkeys(missing.values()))
            text = f"layers not watched: {spans(missing)} ({reasons}); measured: {spans(seen.seen)}"
            self.progress.say(text)
            self.notes.append(text)

    def _digest(self, cell: Cell) -> str:
        plan = self.plan
        identity = {
            **self._about(),
            "text": cell.window.digest,
            "name": cell.window.text,
            "start": cell.window.start,
            "window": cell.window.index,
            "ids": hashlib.blake2b(repr(cell.window.ids).encode(), digest_size=16).hexdigest(),
            "lengths": list(cell.lengths),
            "layers": list(plan.layers),
        }
        return cell_digest(identity, 0)

    def _about(self) -> dict[str, Any]:
        return dict(self._facts)

    @cached_property
    def _facts(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "probe": _VERSION,
            "model": self.loaded.name,
            "fingerprint": fingerprint(self.loaded.model),
            "weights": plan.mechanism.label,
            "metrics": list(plan.groups),
            "near_zero": list(plan.near_zero),
            "sink_keys": list(plan.sink_keys),
            "device": self.loaded.model.device.type,
            "dtype": str(self.loaded.model.dtype),
        }


def run_backbone(loaded: LoadedModel, ids: Sequence[int]) -> None:
    """One forward pass over one sequence, without the language-model head and without a cache."""
    model = loaded.model.base_model
    more = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    model(input_ids=torch.tensor([ids], device=loaded.model.device), **more)


def fingerprint(model: Any) -> str:
    """Hash of a model's configuration, its attention implementation, and a sample of every parameter."""
    found = hashlib.blake2b(digest_size=16)
    config = model.config.to_dict()
    config.pop("_name_or_path", None)
    config.pop("transformers_version", None)
    name = getattr(model.config, "_attn_implementation", None)
    config["attention"] = getattr(name, "base", name)  # backends differ in their last bits; a watched one has a base
    found.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, value in model.named_parameters():
        flat = value.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 256)].float().cpu().numpy()
        found.update(f"{name} {tuple(value.shape)}".encode() + sample.tobytes())
    return found.hexdigest()


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


class Watched:
    """The observer of one forward pass: statistics of every call, segment by segment.

    ``replays`` serves several passes of one plan.
    """

    def __init__(
        self, plan: Plan, lengths: tuple[int, ...], progress: Progress, work: float, replays: Replays | None = None
    ) -> None:
        self._plan = plan
        self._lengths = lengths
        self._progress = progress
        self._work = work
        self._replays = replays or Replays()
        # Of each call: snapshots, their names, and what is known of each.
        self._finished: list[tuple[torch.Tensor, list[str], list[dict[str, Any]]]] = []

    def __call__(self, call: Any) -> None:
        given = call.statistics_arguments()
        # A layer that looks ahead has no shorter lengths in it.
        ahead = not given["causal"] and given["mask"] is None
        lengths = self._lengths[-1:] if ahead else self._lengths
        sinks = given.pop("sinks")
        tensors = [call.q, call.k, *itertools.chain.from_iterable(call.views), *([] if sinks is None else [sinks])]

        def compute(q: torch.Tensor, k: torch.Tensor, *more: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
            pairs = iter(more[: 2 * len(call.views)])
            same = replace(
                call, q=q, k=k, views=tuple(zip(pairs, pairs, strict=True)), sinks=None if sinks is None else more[-1]
            )
            return self._snapshots(same, lengths)

        # A mechanism's parameters differ by layer, and are no operands.
        if call.own is not None or any(isinstance(value, torch.Tensor) for value in given.values()):
            found, names = compute(*tensors)
        else:
            found, names = self._replays(compute, tensors, (tuple(given.items()), lengths))
        facts = []
        for length in lengths:
            uniform = {f"g_sink_uniform_{k}": _uniform(given, length, k) for k in self._plan.sink_keys}
            facts.append({"length": length, "layer": call.layer, **uniform})
        self._finished.append((found, names, facts))
        self._progress.advance(0, self._work)

    def _snapshots(self, call: Any, lengths: tuple[int, ...]) -> tuple[torch.Tensor, list[str]]:
        """Sums up to each length, (lengths, names, B, H), and their names."""
        if self._plan.mechanism.own and call.own is not None:
            return self._own_snapshots(call, lengths)
        tensors, arguments = self._plan.mechanism.inputs(call)
        sums = HeadSums(unit_rows=self._plan.mechanism.unit_rows)
        start = 0
        snapshots = []
        for length in lengths:
            pieces, more = (tensors, arguments) if len(lengths) == 1 else segment(tensors, arguments, start, length)
            found = self._statistics(pieces, more)
            sums.add(found, None if sums.unit_rows else self._shares(pieces, more, found))
            snapshots.append(sums.snapshot(self._plan.sink_keys))
            start = length
        return stack(snapshots), list(snapshots[0])

    def _own_snapshots(self, call: Any, lengths: tuple[int, ...]) -> tuple[torch.Tensor, list[str]]:
        """The same of a mechanism of the model's own: streamed if it can be, else by definition."""
        form = own.streamed(call)
        sums = HeadSums(unit_rows=form is not None and form.arguments["weights"] in own.UNIT)
        near_zero = self._plan.near_zero if "sparsity" in self._plan.groups else ()
        start = 0
        snapshots = []
        for length in lengths:
            if form is not None:
                pieces, more = segment(form.tensors, form.arguments, start, length)
                found = self._statistics(pieces, more)
                sums.add(found, None if sums.unit_rows else self._shares(pieces, more, found))
            else:
                for rows, block in own.blocks(call, (start, length), length):
                    found = own.block_statistics(
                        block, rows, int(call.query_offset), near_zero=near_zero, need=parts_needed(self._plan.groups)
                    )
                    there = [k for k in self._plan.sink_keys if k <= length]
                    shares = own.block_shares(block, [k - 1 for k in there], found.mass)
                    sums.add(found, self._by_key(there, shares, found) if "sinks" in self._plan.groups else None)
            snapshots.append(sums.snapshot(self._plan.sink_keys))
            start = length
        return stack(snapshots), list(snapshots[0])

    def _statistics(self, tensors: tuple[torch.Tensor, ...], arguments: dict[str, Any]) -> Any:
        from theory_kernels import attention_statistics

        return attention_statistics(
            *tensors,
            **arguments,
            near_zero=self._plan.near_zero if "sparsity" in self._plan.groups else (),
            need=parts_needed(self._plan.groups),
        )

    def _shares(
        self, tensors: tuple[torch.Tensor, ...], arguments: dict[str, Any], found: Any
    ) -> dict[int, torch.Tensor] | None:
        """Of the sink keys, where rows do not sum to one."""
        if "sinks" not in self._plan.groups:
            return None
        there = [k for k in self._plan.sink_keys if k <= tensors[1].shape[2]]
        shares = key_shares(tensors, arguments, [k - 1 for k in there], found.visible, found.mass)
        return self._by_key(there, shares, found)

    def _by_key(self, there: list[int], shares: torch.Tensor, found: Any) -> dict[int, torch.Tensor]:
        none = torch.zeros_like(found.mass[..., 0])
        return dict.fromkeys(self._plan.sink_keys, none) | dict(zip(there, shares.unbind(-1), strict=True))

    def frame(self, window: Window, model: str) -> pd.DataFrame | None:
        """The rows of the layers that are finished; None if there are none."""
        import pandas as pd

        plan = self._plan
        if not self._finished:
            return None
        stacked, names, known = zip(*self._finished, strict=True)
        sums = unpack(names[0], stacked)
        every = list(itertools.chain.from_iterable(known))
        found = head_measures(sums, near_zero=plan.near_zero, sink_keys=plan.sink_keys, groups=plan.groups)
        found = {name: value[:, 0].reshape(-1) for name, value in found.items()}
        heads = sums["visible"].shape[-1]
        facts = {name: [fact[name] for fact in every] for name in every[0]}
        if "sinks" not in plan.groups:
            facts = {name: values for name, values in facts.items() if not name.startswith("g_sink")}
        columns = {
            "model": model,
            "weights": plan.mechanism.label,
            "text": window.text,
            "window": window.index,
            "start": window.start,
            "length": np.repeat(facts.pop("length"), heads),
            "layer": np.repeat(facts.pop("layer"), heads),
            "head": np.tile(np.arange(heads), len(every)),
            **{name: np.repeat(values, heads) for name, values in facts.items()},
        }
        return pd.DataFrame({**columns, **found})


#: Layers ask for the same few.
_uniform_ratio = lru_cache(maxsize=256)(measures.uniform_sink_ratio)


def _uniform(arguments: dict[str, Any], length: int, k: int) -> float:
    """gSinkRatio(k) of equal weights over what the rows of a watched call see."""
    mask = arguments.get("mask")
    if mask is not None:
        sees = mask[..., :length, :length].double()
        equal = sees / sees.sum(-1, keepdim=True).clamp_min(1.0)
        return float(measures.divide(float(equal[..., k - 1].sum()), float(equal.sum()))) if k <= length else math.nan
    return _uniform_ratio(
        length,
        k,
        causal=arguments.get("causal", True),
        window=arguments.get("window"),
        offset=int(arguments.get("query_offset", 0)),  # one text a run
    )


def segment(
    tensors: tuple[torch.Tensor, ...], arguments: dict[str, Any], start: int, stop: int
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Rows ``start`` to ``stop`` of a causal self-attention call, with the keys that they can see."""
    queries = slice(start, stop)
    cut = tuple(x[:, :, queries] if index % 2 == 0 else x[:, :, :stop] for index, x in enumerate(tensors))
    more = dict(arguments)
    more["query_offset"] = arguments.get("query_offset", 0) + start
    if more.get("lengths") is not None:
        more["lengths"] = more["lengths"].clamp(max=stop)
    if more.get("key_starts") is not None:
        more["key_starts"] = more["key_starts"].clamp(max=stop)
    if more.get("mask") is not None:
        more["mask"] = more["mask"][:, :, queries, :stop]
    for name in ("query_starts", "query_lengths"):
        if more.get(name) is not None:
            more[name] = (more[name] - start).clamp(0, stop - start)
    threshold = more.get("eta_threshold")
    if isinstance(threshold, torch.Tensor) and threshold.ndim == 3:
        more["eta_threshold"] = threshold[..., queries]
    return cut, more
