"""A run's folder: what it knows of the run that is in it, and the files of a finished one.

::

    DIR/config.json, model.safetensors   the model, which transformers and ``theory-lab probe DIR`` read
    DIR/tokenizer.json, ...              of a corpus, or of the model that a task of words started from
    DIR/train.json                       settings, data, versions, device, losses, speed; written last
    DIR/log.csv, layers.csv              see theory_lab.training.logs
    DIR/checkpoints/step-N               see theory_lab.training.checkpoints
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theory_lab.errors import InputError
from theory_lab.outside import read_json
from theory_lab.store import provenance, write_whole
from theory_lab.training import checkpoints

if TYPE_CHECKING:
    from accelerate import Accelerator

    from theory_lab.tasks.source import Source
    from theory_lab.training.held_out import Held, Opened
    from theory_lab.training.settings import TrainSettings

#: The file that says a run is finished, and what it was.
RECORD = "train.json"
_OURS = (RECORD, "config.json", "model.safetensors", "log.csv", "layers.csv", "tensorboard", checkpoints.FOLDER)
_PARTIAL = ".model.partial"


def identity(settings: TrainSettings, source: Source) -> dict[str, Any]:
    """What decides a run's numbers, in plain JSON."""
    return json.loads(json.dumps({**settings.identity(), "source": _placeless(source.describe())}))


def _placeless(about: dict[str, Any]) -> dict[str, Any]:
    """Without the folder: data may move between machines."""
    return {key: value for key, value in about.items() if key not in ("folder", "path")}


def find(out: Path, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """What the folder knows of this run, None if it is new.

    Raises
    ------
    InputError
        If it holds another run, or something else.
    """
    if out.exists() and not out.is_dir():
        raise InputError("out", str(out), "a folder is allowed, and this is a file")
    known = _read(out / RECORD)
    for path in reversed(checkpoints.found(out)):
        known = known or _read(path / "state.json")
    if known is None:
        others = [p.name for p in out.iterdir() if not p.name.startswith(".")] if out.is_dir() else []
        foreign = [name for name in others if name not in _OURS]
        if foreign:
            raise InputError("out", str(out), f"a new folder, or that of a run, is allowed; it holds {foreign[0]}")
        return None
    theirs = known.get("identity")
    theirs = theirs if isinstance(theirs, dict) else {}
    for name in sorted({*theirs, *wanted}):
        if theirs.get(name) != wanted.get(name):
            raise InputError(
                "out",
                str(out),
                f"it holds a run with {name} {_short(theirs.get(name))}, and this one has {_short(wanted.get(name))}: "
                "name another folder, or give it the same settings",
            )
    return known


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def claim(out: Path) -> None:
    """Make the folder; StoreError now, not after an hour's work, if it cannot be written."""
    with checkpoints.writing(out, lambda: "name a folder that can be"):
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=out, prefix=".probe-"):
            pass


def make(
    settings: TrainSettings,
    identity_: dict[str, Any],
    opened: Opened,
    accelerator: Accelerator,
    held: Held,
    last: float,
    seconds: float,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """The record of a finished run.

    Returns
    -------
    dict
        ``loss`` is that of the last step's batch, ``val_loss`` with its standard error ``val_loss_se`` that of the
        held-out tokens, nats a token; ``seconds`` and ``tokens_per_second`` are those of the steps alone; ``mfu`` is
        the share of the device's bfloat16 limit, with every pair of positions counted, and ``mfu_causal`` with those
        alone that a causal model needs.
    """
    import torch

    from theory_lab.training.device import describe

    rate = settings.tokens_per_step * settings.steps / seconds
    made = {
        "finished": True,
        "identity": identity_,
        "settings": settings.record(),
        "source": opened.source.describe(),
        "steps": settings.steps,
        "tokens": settings.tokens_per_step * settings.steps,
        "loss": last,
        "val_loss": held.loss,
        "val_loss_se": held.error,
        "val_accuracy": held.accuracy,
        "held_out_tokens": int(sum(batch.tokens.size for batch in opened.held_out)),
        "seconds": seconds,
        "tokens_per_second": rate,
        "device": describe(accelerator),
        "processes": accelerator.num_processes,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "versions": {**provenance(), "torch": str(torch.__version__)},
        **facts,
    }
    limit = facts.get("peak_flops")
    for name in ("flops_per_token", "flops_per_token_causal"):
        made["mfu" + name.removeprefix("flops_per_token")] = None if limit is None else rate * facts[name] / limit
    return made


def finish(out: Path, model: Any, opened: Opened, record: dict[str, Any]) -> None:
    """Write the model's files, each whole, and the record last."""
    partial = out / _PARTIAL
    with checkpoints.writing(out, checkpoints.newest_of(out)):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            checkpoints.save_model(model, partial)
            if opened.tokenizer is not None:
                _save_tokenizer(opened.tokenizer, partial)
            checkpoints.flush(partial)
            for path in sorted(partial.iterdir()):
                os.replace(path, out / path.name)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    write_whole(str(out / RECORD), json.dumps(record, indent=1).encode())


def _save_tokenizer(file: Path, folder: Path) -> None:
    """``tokenizer.json`` and what transformers needs beside it."""
    from theory_lab.corpus.tokenizer import tokenizer_settings

    shutil.copyfile(file, folder / "tokenizer.json")
    beside = [file.with_name(name) for name in ("tokenizer_config.json", "special_tokens_map.json")]
    for found in (path for path in beside if path.is_file()):
        shutil.copyfile(found, folder / found.name)
    if not beside[0].is_file():
        (folder / beside[0].name).write_bytes(tokenizer_settings())
