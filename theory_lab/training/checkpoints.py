"""Checkpoints: what a killed run continues from, bit for bit.

::

    DIR/checkpoints/step-00000200/config.json            the model's configuration
    DIR/checkpoints/step-00000200/model.safetensors      its weights
    DIR/checkpoints/step-00000200/optimizer.safetensors  AdamW's moments, by parameter name
    DIR/checkpoints/step-00000200/state.json             the step, the settings, and what the numbers depend on

A checkpoint is written under another name, flushed to disk and renamed: it is there whole or not at all. Batches are a
pure function of seed and step, so that no state of a generator belongs to it. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theory_lab.errors import InputError, StoreError
from theory_lab.outside import foreign, read_json

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

_NAME = re.compile(r"step-(\d+)")
FOLDER = "checkpoints"
#: Separates a parameter's name from the name of a moment.
_MARK = "//"


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, a tied one once, on the CPU."""
    kept = dict(model.named_parameters())
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    kept |= {name: tensor for name, tensor in model.state_dict().items() if name not in every}
    return {name: tensor.detach().cpu().contiguous() for name, tensor in kept.items()}


def save_model(model: Any, folder: Path) -> None:
    """Write ``config.json`` and ``model.safetensors``, which transformers reads."""
    from safetensors.torch import save_file

    # Readers take the head along for a model that is named so, and leave it out otherwise.
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    save_file(weights(model), folder / "model.safetensors", metadata={"format": "pt"})


def save(out: Path, step: int, model: Any, optimizer: Optimizer, state: dict[str, Any], keep: int) -> Path:
    """Write a checkpoint, then drop all but the newest `keep`.

    Raises
    ------
    StoreError
        If it cannot be written; those before it are kept.
    """
    from safetensors.torch import save_file

    root = out / FOLDER
    target, partial = root / f"step-{step:08d}", root / f".step-{step:08d}.partial"
    with writing(out, newest_of(out)):
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            save_model(model, partial)
            save_file(_moments(model, optimizer), partial / "optimizer.safetensors")
            (partial / "state.json").write_text(json.dumps({"step": step, **state}, indent=1), encoding="utf-8")
            flush(partial)
            shutil.rmtree(target, ignore_errors=True)
            os.replace(partial, target)
            flush(root)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    for old in found(out)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def found(out: Path) -> list[Path]:
    """Checkpoints of a run, the oldest first."""
    root = out / FOLDER
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if _NAME.fullmatch(path.name))


def step_of(path: Path) -> int:
    """The step a checkpoint was written after."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def read_state(path: Path) -> dict[str, Any]:
    """``state.json`` of a checkpoint; ValueError or OSError if it is damaged."""
    state = read_json(path / "state.json")
    if not isinstance(state, dict) or type(state.get("step")) is not int or state["step"] != step_of(path):
        raise ValueError("state.json does not say the step that its folder is named after")
    return state


def load(path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Put a checkpoint's weights and moments back, in place.

    Raises
    ------
    InputError
        If it belongs to another architecture or vocabulary.
    ValueError, OSError
        If it is damaged.
    """
    weights_there, stored = _read(path / "model.safetensors"), _read(path / "optimizer.safetensors")
    load_weights(model, weights_there, path, "checkpoint")
    names = {parameter: name for name, parameter in model.named_parameters()}
    state: dict[int, dict[str, Tensor]] = {}
    packed = optimizer.state_dict()
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(order):
        prefix = names[parameter] + _MARK
        found_here = {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}
        if found_here:
            state[index] = found_here
    packed["state"] = state
    rates = [group["lr"] for group in optimizer.param_groups]
    # A moment that is not there, or of another shape, is the optimizer's own kind of error.
    with foreign(lambda why: ValueError(f"optimizer.safetensors is damaged ({why})")):
        _check_moments(order, state)
        optimizer.load_state_dict(packed)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate  # a tensor that a captured graph writes to must stay that tensor


def _check_moments(order: list[Tensor], state: dict[int, dict[str, Tensor]]) -> None:
    names = {frozenset(moments) for moments in state.values()}
    if len(names) > 1 or (state and "step" not in next(iter(names))):
        raise ValueError("not every parameter has the same moments")
    for index, moments in state.items():
        for name, value in moments.items():
            if value.shape != order[index].shape and (name != "step" or value.numel() != 1):
                raise ValueError(
                    f"a moment of shape {tuple(value.shape)} of a parameter of {tuple(order[index].shape)}"
                )


def load_weights(model: nn.Module, stored: dict[str, Tensor], path: Path, field: str) -> None:
    """Copy stored weights into a model of the same architecture and vocabulary, or raise InputError."""
    import torch

    wanted = dict(model.named_parameters())
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    wanted |= {name: tensor for name, tensor in model.state_dict().items() if name not in every}
    missing = [name for name in wanted if name not in stored]
    extra = [name for name in stored if name not in wanted and name not in every]
    if missing or extra:
        what = f"no {missing[0]}" if missing else f"{extra[0]}, which this model does not have"
        raise InputError(field, str(path), f"it belongs to another architecture: it has {what}")
    for name, tensor in wanted.items():
        if tensor.shape != stored[name].shape:
            raise InputError(
                field,
                str(path),
                f"it belongs to another size or vocabulary: {name} is {tuple(stored[name].shape)} there and "
                f"{tuple(tensor.shape)} here",
            )
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(stored[name])


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path.name} is damaged ({error})") from None


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Weights of a trained model's folder; InputError if there are none to read."""
    try:
        return _read(folder / "model.safetensors")
    except (OSError, ValueError) as error:
        raise InputError("start", str(folder), f"its model.safetensors cannot be read ({error})") from None


def _moments(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}{_MARK}{key}": value.detach().cpu().contiguous()
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def flush(folder: Path) -> None:
    """Make sure that a folder's files, and their names, are on the disk."""
    for path in [*folder.iterdir(), folder]:
        if path.is_file() or path == folder:
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


@contextlib.contextmanager
def writing(out: Path, kept: Callable[[], str]) -> Iterator[None]:
    """Turn a failed write into one line that says what is still there."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise StoreError(f"out: {out}; it cannot be written ({reason}); {kept()}") from error


def newest(out: Path) -> str:
    """What a run that stops can be continued from, in words."""
    there = found(out)
    return f"the checkpoint after step {step_of(there[-1])} is kept" if there else "no checkpoint was written before"


def newest_of(out: Path) -> Callable[[], str]:
    """:func:`newest`, asked when the words are needed."""
    return lambda: newest(out)
