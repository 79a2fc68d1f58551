"""GGUF files, dequantized once and kept as safetensors, which load two orders of magnitude faster.

A GGUF file holds quantized weights, the configuration and the tokenizer in one. transformers reads it, but refuses to
save what it has read; the model is therefore built again from its configuration and its weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import os
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from theory_lab.errors import InputError
from theory_lab.models.cache import cache_dir, check_room, make_folder
from theory_lab.models.checks import check_announced, check_built, check_filled, wrong_shape
from theory_lab.models.headers import Header, read_gguf
from theory_lab.models.progress import Meter, say
from theory_lab.outside import reason

_MAGIC = b"GGUF"
_BIAS = re.compile(r"blk\.\d{1,9}\.(attn_(q|k|v|qkv|output)|ffn_(gate|up|down))\.bias", re.ASCII)
_BLOCK = re.compile(r"blk\.(\d{1,9})\.", re.ASCII)


def require_transformers() -> None:
    """Raise InputError if models cannot be loaded."""
    for name in ("torch", "transformers", "safetensors"):
        if importlib.util.find_spec(name) is None:
            raise InputError("model", f"{name} is not installed", "pip install 'theory-lab[models]' to load models")


def require_gguf() -> None:
    """Raise InputError if GGUF files cannot be read."""
    require_transformers()
    for package in ("gguf", "accelerate"):  # transformers asks for both
        if importlib.util.find_spec(package) is None:
            raise InputError(
                "model", f"{package} is not installed", "pip install 'theory-lab[models]' to read GGUF files"
            )


def check_gguf(path: Path) -> None:
    """Raise InputError unless ``path`` is a GGUF file."""
    if not path.is_file():
        raise InputError("model", str(path), "a GGUF file is allowed, and there is no such file")
    try:
        with open(path, "rb") as file:
            head = file.read(len(_MAGIC))
    except OSError as error:
        raise InputError("model", str(path), f"it cannot be read ({error.strerror or error})") from error
    if head != _MAGIC:
        raise InputError("model", str(path), "a GGUF file is allowed, and this one does not begin as one does")


def convert_gguf(file: str | os.PathLike[str], folder: str | os.PathLike[str], *, quiet: bool = False) -> Path:
    """Dequantize a GGUF file into a folder in the Hugging Face layout (safetensors, float32, so that no bit is lost).

    Parameters
    ----------
    file : path
        The ``.gguf`` file.
    folder : path
        New or empty, or made by this function before.
    quiet : bool
        Without progress on standard error.

    Raises
    ------
    InputError
        If the file is no GGUF file or of an architecture that transformers does not read, or the folder is in use.
    StoreError
        If the disk is full or the folder cannot be written.
    """
    source, target = Path(file), Path(folder).absolute()
    check_gguf(source)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError("folder", str(folder), "a new or empty folder is allowed")
    require_gguf()
    check_room(target, _bytes_needed(source))

    def fill(made: Path) -> Mapping[str, Any]:
        return {**convert_into(source, made, name=source.stem, quiet=quiet), "source": source.name}

    return make_folder(target, fill, lock=False)


def converted_folder(file: Path, *, quiet: bool = False) -> Path:
    """The folder in the cache that holds this GGUF file's weights; made if need be."""
    check_gguf(file)
    require_gguf()
    about = file.stat()
    key = f"{file.resolve()}\n{about.st_size}\n{about.st_mtime_ns}"
    digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    target = cache_dir() / "models" / "gguf" / digest

    def fill(made: Path) -> Mapping[str, Any]:
        check_room(made, _bytes_needed(file))
        return {**convert_into(file, made, name=file.stem, quiet=quiet), "source": file.name}

    return make_folder(target, fill, waiting=lambda: say(f"waiting for another process that converts {file}", quiet))


def convert_into(file: Path, folder: Path, *, name: str, quiet: bool) -> dict[str, Any]:
    """Write the model and tokenizer of a GGUF file into an existing folder; what its manifest should say of it."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    with Meter(f"converting {file.name} to safetensors (once)", None, quiet), hushed():
        where, gguf, header = str(file.parent), file.name, read_gguf(file)
        try:
            # transformers draws the GGUF reader's bar whatever its verbosity is.
            with contextlib.redirect_stderr(io.StringIO()):
                settings = AutoConfig.from_pretrained(where, gguf_file=gguf)
                _check_layers(file, header, settings)
                check_built(file, lambda: AutoModelForCausalLM.from_config(settings), header)
                kind: Any = AutoModelForCausalLM  # its annotations leave out the report
                read, report = kind.from_pretrained(
                    where,
                    gguf_file=gguf,
                    dtype=torch.float32,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # refused below, with their names
                )
                tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=gguf)
            check_filled(file, report)
            _check_biases(file, header, read)
            rebuilt = _rebuilt(file, read, name)
        except ImportError as error:
            raise InputError("model", str(file), f"a package that it needs is missing ({reason(error)})") from error
        except (InputError, MemoryError):
            raise
        except Exception as error:  # each library it goes through raises its own, tokenizers a bare Exception
            raise InputError("model", str(file), f"transformers cannot read it ({reason(error)})") from error
        try:
            rebuilt.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        except SafetensorError as error:  # a full disk is no OSError to it, and only its text holds the number
            number = re.search(r"os error (\d+)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
    return {"name": name, "dtype": "float32", "transformers": metadata.version("transformers")}


def _rebuilt(file: Path, read: Any, name: str) -> Any:
    """The model that was read, made from its configuration alone, so that it can be saved."""
    import torch

    given = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    config = type(read.config)(**{**given, "_name_or_path": name})
    with torch.device("meta"):  # without weights of its own: it takes those that were read
        rebuilt = type(read)(config)
    weights, wanted = read.state_dict(), rebuilt.state_dict()
    for key in sorted(weights.keys() & wanted.keys()):
        # Some versions of transformers put a GGUF file's tensors into the model whatever their shapes are.
        if weights[key].shape != wanted[key].shape:
            raise wrong_shape(file, key, weights[key].shape, wanted[key].shape)
    rebuilt.load_state_dict(weights, strict=True, assign=True)
    rebuilt.tie_weights()
    rebuilt.generation_config = read.generation_config
    return rebuilt


def _check_layers(file: Path, header: Header, settings: Any) -> None:
    """InputError unless the layers are as many as the configuration says.

    transformers would leave out those beyond, and say nothing; of those that there are not it would first make a table
    of names, in a time of layers times modules.
    """
    said = getattr(settings.get_text_config(), "num_hidden_layers", None)
    numbers = {int(found[1]) for tensor in header.tensors if (found := _BLOCK.match(tensor.name))}
    if numbers and isinstance(said, int) and said != max(numbers) + 1:
        raise InputError(
            "model", str(file), f"its configuration says {said} layers, and its tensors go up to layer {max(numbers)}"
        )


def _check_biases(file: Path, header: Header, model: Any) -> None:
    """InputError for a bias of attention or feed-forward that has no place in the model: transformers leaves it out."""
    import gguf

    biases = [tensor.name for tensor in header.tensors if _BIAS.fullmatch(tensor.name)]
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    kind = kinds.get(header.metadata.get("general.architecture", ""))
    if not biases or kind is None:
        return
    names = gguf.get_tensor_name_map(kind, model.config.get_text_config().num_hidden_layers)
    placed = {names.get_name(key, try_suffixes=(".bias",)) for key in model.state_dict() if key.endswith(".bias")}
    for name in biases:
        if name not in placed:
            raise InputError("model", str(file), f"transformers has no place for its tensor {name}, and leaves it out")


def _bytes_needed(file: Path) -> int:
    """Size of the weights as float32; InputError for a header that says what cannot be."""
    header = read_gguf(file)
    check_announced(file, header.metadata, header)
    return 4 * header.elements


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Keep transformers' progress bars and remarks off standard error; ours say what there is to say."""
    import warnings

    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
