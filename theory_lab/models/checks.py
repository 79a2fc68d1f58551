"""What a model folder must not hold: pickles in place of weights, code, names that lead elsewhere, sizes that lie."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from theory_lab.errors import InputError
from theory_lab.models.headers import Header, counts, read_safetensors
from theory_lab.outside import MOST_JSON, one_line, read_json

#: Weight files that are pickles: opening one runs whatever it says.
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".msgpack", ".h5")
_INDEX = "model.safetensors.index.json"
#: Bytes of a configuration; its numbers; layers and what else is built one by one.
_MOST_CONFIG, _MOST_NUMBER, _MOST_LAYERS, _MOST_PARTS = 16 << 20, 1 << 40, 1000, 100_000
_LAYERS = re.compile(r"layers?$|blocks?$|(^|[._])block_count$|(^|[._])depths?$")
_PARTS = re.compile(r"(^|[._])(n|num)_|labels?$|experts?$|heads?$|count$")
#: Numbers that are sizes, and build nothing one by one.
_SIZES = re.compile(
    r"position|token|seed|window|norm|vocab|emb|inner|ctx|context|hidden_size|tensor|kv_count|train|merges"
)
#: Layers that are never too many: configurations name defaults of parts that a model does not have.
_FEW_LAYERS = 128
#: A token's number, which readers count up to, and a length to which texts are padded.
_MOST_TOKENS, _MOST_PADDING = 1 << 24, 1 << 20
#: How many times the numbers in its files a model may have, and numbers beside: quantized files pack many into one,
#: and small models have masks of all pairs of positions.
_MOST_TIMES, _MOST_BESIDE = 16, 1 << 24


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
        configuration names code of its own (or a kernel of the Hub) and ``trust_remote_code`` is False, if the index
        names files elsewhere, a file's header says what its file does not bear out, or the configuration announces more
        layers than the files have tensors.
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
        for name in set(map(str, names.values())) if isinstance(names, dict) else ():
            _check_inside(folder, name)
    if not trust_remote_code:  # code of a folder may read files of its own making
        check_announced(folder, config, header_of(weights))
    return config


def header_of(files: list[Path]) -> Header:
    """The headers of several safetensors files as one."""
    return Header(tuple(tensor for file in files for tensor in read_safetensors(file).tensors))


def check_announced(path: Path, config: dict[str, Any], header: Header) -> None:
    """Refuse a configuration whose numbers would be built one by one, or allocated, before any weight is looked at.

    Raises
    ------
    InputError
        The message names the key.
    """
    tensors = len(header.tensors)
    for name, value in counts(config):
        key = name.lower()
        most = _MOST_NUMBER
        if not _SIZES.search(key):
            if _LAYERS.search(key):
                most = min(max(tensors, _FEW_LAYERS), _MOST_LAYERS)
            elif _PARTS.search(key):
                most = _MOST_PARTS
        if abs(value) > most:
            beside = f", and its files have {tensors:,} tensors" if most < _MOST_PARTS else ""
            raise InputError("model", str(path), f"its configuration says {name} = {one_line(value, 40)}{beside}")


def check_built(path: Path, build: Any, header: Header) -> None:
    """Build a model without memory, and refuse it if it is far larger than its files.

    Parameters
    ----------
    path : Path
        For the message.
    build : callable
        Makes the model; it is called where torch's device is "meta".
    header : Header
        Of its files.

    Raises
    ------
    InputError
        A library would fill up with random numbers what the files do not hold, and first allocate it.
    """
    import torch

    with torch.device("meta"):
        model = build()
    seen = {id(one): one.numel() for one in (*model.parameters(), *model.buffers())}
    size, there = sum(seen.values()), header.elements
    if size > _MOST_TIMES * there + _MOST_BESIDE:
        raise InputError(
            "model", str(path), f"its configuration makes a model of {size:,} numbers, and its files hold {there:,}"
        )


def check_filled(path: Path, report: Mapping[str, Any]) -> None:
    """Refuse a model whose files do not hold all of it: a library fills up the rest with random numbers.

    Parameters
    ----------
    path : Path
        For the message.
    report : mapping
        What transformers says of its loading: ``missing_keys``, and ``mismatched_keys`` with the file's shape and the
        model's.

    Raises
    ------
    InputError
        The message names a tensor.
    """
    for name, there, wanted in sorted(report.get("mismatched_keys", ())):
        raise wrong_shape(path, name, there, wanted)
    missing = sorted(key for key in report["missing_keys"] if "pooler" not in key)
    if missing:
        many = "the tensor" if len(missing) == 1 else f"{len(missing)} tensors, such as"
        raise InputError("model", str(path), f"its weights lack {many} {one_line(missing[0], 80)}")


def wrong_shape(path: Path, name: str, there: Iterable[int], wanted: Iterable[int]) -> InputError:
    """The error for a tensor of another shape than its configuration says."""
    have, want = (" x ".join(map(str, shape)) or "a single number" for shape in (there, wanted))
    return InputError(
        "model", str(path), f"its tensor {one_line(name, 80)} is {have}, and its configuration makes it {want}"
    )


def check_tokenizer(folder: Path) -> None:
    """Refuse a tokenizer whose numbers would be counted through, or allocated, by the library that reads it.

    Raises
    ------
    InputError
        For a token's number, or a length to pad to, that no vocabulary or text has.
    """
    whole = _mapping(_optional(folder, "tokenizer.json"))
    listed = whole.get("added_tokens")
    added = [(one.get("content"), one.get("id")) for one in map(_mapping, listed if isinstance(listed, list) else ())]
    decoder = _mapping(_mapping(_optional(folder, "tokenizer_config.json")).get("added_tokens_decoder"))
    numbered = (
        ("tokenizer.json", [*_mapping(_mapping(whole.get("model")).get("vocab")).items(), *added]),
        ("vocab.json", list(_mapping(_optional(folder, "vocab.json")).items())),
        ("added_tokens.json", list(_mapping(_optional(folder, "added_tokens.json")).items())),
        ("tokenizer_config.json", [(key, int(key)) for key in decoder if key.isdecimal() and len(key) < 20]),
    )
    for name, pairs in numbered:
        for token, number in pairs:
            if isinstance(number, int) and number > _MOST_TOKENS:
                raise InputError(
                    "model", str(folder), f"its {name} numbers the token {one_line(token, 40)!r} {one_line(number, 40)}"
                )
    padding = _mapping(whole.get("padding"))
    for key, length in (*_mapping(padding.get("strategy")).items(), *padding.items()):
        if isinstance(length, int) and length > _MOST_PADDING:
            raise InputError("model", str(folder), f"its tokenizer.json pads with {one_line(key, 40)} = {length}")


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _optional(folder: Path, name: str) -> Any:
    """The content of a JSON file; None if there is none."""
    return _read(folder, name, "", MOST_JSON) if (folder / name).exists() else None


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


def _read(folder: Path, name: str, allowed: str, most: int = _MOST_CONFIG) -> dict[str, Any]:
    try:
        found = read_json(folder / name, most)
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
            if key.endswith("_implementation") and "/" in one_line(inner):
                yield f"{where} asks for a kernel from the Hub ({key})"
            yield from _code(inner, f"{where} ({key})")
    elif isinstance(value, list):
        for inner in value:
            yield from _code(inner, where)


def _remote(folder: Path, what: str) -> InputError:
    return InputError("model", str(folder), f"its {what}: allowed with trust_remote_code, if you trust its author")
