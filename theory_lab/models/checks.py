"""What a model folder must not hold: pickles in place of weights, code, names that lead elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from theory_lab.errors import InputError

#: Weight files that are pickles: opening one runs whatever it says.
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".msgpack", ".h5")
_INDEX = "model.safetensors.index.json"


def check_folder(folder: Path, trust_remote_code: bool = False) -> dict[str, Any]:
    """Read a model folder's configuration and refuse what is not safe to load.

    Returns
    -------
    dict
        The content of ``config.json``.

    Raises
    ------
    InputError
        If there is no configuration or no safetensors file, if weights are a pickle or an adapter's, if the
        configuration names code of its own (or a kernel of the Hub) and ``trust_remote_code`` is False, or if the index
        names files elsewhere.
    """
    config = _read(folder, "config.json", "a folder with a config.json and safetensors weights is allowed")
    if not trust_remote_code:
        for where in _code(config, "config.json"):
            raise _remote(folder, where)
        tokenizer = folder / "tokenizer_config.json"
        if tokenizer.exists():
            for where in _code(_read(folder, tokenizer.name, ""), tokenizer.name):
                raise _remote(folder, where)
    if (folder / "adapter_config.json").exists():
        raise InputError(
            "model",
            str(folder),
            "it is an adapter, for another model's weights: a folder with both merged is allowed",
        )
    weights = list(folder.glob("*.safetensors"))
    if not weights:
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
        if pickles:
            raise InputError(
                "model", str(folder), f"{pickles[0]} is a pickle, which runs code when opened: safetensors is allowed"
            )
        raise InputError("model", str(folder), "a folder with safetensors weights is allowed, and this one has none")
    for file in weights:
        _check_inside(folder, file.name)
    if (folder / _INDEX).exists():
        names = _read(folder, _INDEX, "").get("weight_map", {})
        for name in set(names.values()) if isinstance(names, dict) else ():
            _check_inside(folder, str(name))
    return config


def check_path(path: Path) -> None:
    """Refuse a single weight file that is a pickle; InputError."""
    if path.suffix.lower() in PICKLES:
        raise InputError(
            "model", str(path), "a pickle checkpoint runs code when opened: a safetensors folder or .gguf is allowed"
        )


def _check_inside(folder: Path, name: str) -> None:
    """A weight file must be a safetensors file directly in the folder (a link, as the Hub's cache has them, may be)."""
    path = folder / name
    if path.parent != folder or path.suffix != ".safetensors" or name.startswith("."):
        raise InputError("model", str(folder), f"its index names {name!r}: safetensors files in the folder are allowed")
    if not path.is_file():
        raise InputError("model", str(folder), f"{name} is missing: an incomplete download?")


def _read(folder: Path, name: str, allowed: str) -> dict[str, Any]:
    try:
        found = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError("model", str(folder), allowed) from None
    except (OSError, ValueError) as error:
        raise InputError("model", str(folder), f"its {name} cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise InputError("model", str(folder), f"its {name} is no JSON object")
    return found


def _code(value: Any, where: str) -> Iterator[str]:
    """Where and how a configuration, or one nested in it, asks for code to run."""
    if isinstance(value, dict):
        if value.get("auto_map") or value.get("custom_pipelines"):
            yield f"{where} asks for code of its own (auto_map)"
        for key, inner in value.items():
            if key.endswith("_implementation") and "/" in str(inner):
                yield f"{where} asks for a kernel from the Hub ({key})"
            yield from _code(inner, f"{where} ({key})")
    elif isinstance(value, list):
        for inner in value:
            yield from _code(inner, where)


def _remote(folder: Path, what: str) -> InputError:
    return InputError("model", str(folder), f"its {what}: allowed with trust_remote_code, if you trust its author")
