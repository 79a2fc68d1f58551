"""Loading a model by name, folder, GGUF file or Hub id."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theory_lab.errors import InputError, hint
from theory_lab.models.cache import no_room
from theory_lab.models.catalog import find_model, is_known, list_models
from theory_lab.models.checks import check_built, check_filled, check_folder, check_path, check_tokenizer, header_of
from theory_lab.models.conversion import converted_folder, hushed, require_transformers
from theory_lab.outside import expanded, foreign, reason

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_DTYPES = ("float32", "float16", "bfloat16", "float64", "auto")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
#: What is taken from the Hub: never a pickle or another framework's weights, and scripts only if they are trusted.
_HUB_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.jinja", "*.model")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be measured.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        In evaluation mode, without gradients, on its device.
    tokenizer : transformers.PreTrainedTokenizerBase or None
        None if the folder has none.
    name : str
        As it was asked for.
    layers, heads, key_heads, head_dim : int
        Of the text model: attention layers, query heads, key heads, size of a head.
    max_positions : int or None
        The longest text it was made for; None if its configuration names no limit.
    causal : bool
        Whether its queries see earlier keys only.
    folder : Path
        Where its files lie.
    """

    model: PreTrainedModel = field(repr=False)
    tokenizer: Any = field(repr=False)
    name: str
    layers: int
    heads: int
    key_heads: int
    head_dim: int
    max_positions: int | None
    causal: bool
    folder: Path

    @property
    def backbone(self) -> Any:
        """The model without its language-model head: what a probe runs, since logits take (T, vocabulary) numbers."""
        return self.model.base_model

    @property
    def device(self) -> torch.device:
        """Where its weights lie."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""
        return self.model.dtype


def load_model(
    name_or_path: str | Path,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    trust_remote_code: bool = False,
    attention: str | None = None,
    quiet: bool = True,
) -> LoadedModel:
    """Load a model and its tokenizer.

    Parameters
    ----------
    name_or_path : str or path
        A known model (fetched if need be), a local folder, a ``.gguf`` file (converted once), or a Hub id
        ``owner/name``. A folder wins over a Hub id of the same name.
    device : str
        ``cpu``, ``cuda``, ``cuda:1`` and so on.
    dtype : {'float32', 'float16', 'bfloat16', 'float64', 'auto'}
        Of the weights and the computation; ``auto`` keeps that of the files.
    trust_remote_code : bool
        Whether code of the model's folder may run.
    attention : str, optional
        transformers' attention implementation: ``sdpa``, ``eager``, ``flash_attention_2``; its own choice if None.
    quiet : bool
        Without progress on standard error.

    Raises
    ------
    InputError
        If there is no such model, it is not safe to load, its weights do not fit its configuration, or an argument is
        not allowed.
    FetchError, StoreError
        As :func:`theory_lab.models.fetch_model`.
    """
    _check_words(dtype, device)
    require_transformers()
    folder = find_folder(name_or_path, trust_remote_code=trust_remote_code, quiet=quiet)
    config = check_folder(folder, trust_remote_code)
    target = check_device(device)
    model = _load(folder, config, dtype=dtype, trust=trust_remote_code, attention=attention)
    try:
        model = model.to(target)
    except RuntimeError as error:
        raise InputError("device", device, f"the model does not fit there ({reason(error)})") from error
    model.eval().requires_grad_(False)
    text = model.config.get_text_config()
    heads = _number(text, "num_attention_heads")
    head_dim = getattr(text, "head_dim", None) or (_number(text, "hidden_size") // heads if heads else 0)
    return LoadedModel(
        model=model,
        tokenizer=_tokenizer(folder, trust_remote_code),
        name=str(name_or_path),
        layers=_number(text, "num_hidden_layers"),
        heads=heads,
        key_heads=_number(text, "num_key_value_heads") or heads,
        head_dim=int(head_dim),
        max_positions=_number(text, "max_position_embeddings") or None,
        causal=any(getattr(module, "is_causal", False) is True for module in model.modules()),
        folder=folder,
    )


def find_folder(name_or_path: str | Path, *, trust_remote_code: bool = False, quiet: bool = True) -> Path:
    """The folder that holds a model's files: fetched, converted or downloaded if need be.

    Raises
    ------
    InputError
        If there is no such model.
    """
    if not isinstance(name_or_path, (str, Path)) or not str(name_or_path).strip() or "\0" in str(name_or_path):
        raise InputError("model", name_or_path, "the name of a model, a folder, a .gguf file or a Hub id is allowed")
    text = str(name_or_path)
    path = expanded(text)
    if isinstance(name_or_path, str) and is_known(text):
        from theory_lab.models.fetching import fetch_model

        return fetch_model(find_model(text).name, quiet=quiet)
    if path.is_dir():
        return path.resolve()
    check_path(path)
    if path.suffix.lower() == ".gguf":
        return converted_folder(path, quiet=quiet)
    if path.is_file():
        raise InputError("model", text, "a folder or a .gguf file is allowed, and this is another file")
    if isinstance(name_or_path, str) and _HUB_ID.fullmatch(text) and not text.startswith("."):
        return _from_hub(text, trust_remote_code, quiet)
    known = [model.name for model in list_models()]
    raise InputError(
        "model",
        text,
        f"{hint(text, known)}there is no such file or folder; known are {', '.join(known)}, or owner/name",
    )


def _from_hub(name: str, trust: bool, quiet: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    from theory_lab.models.progress import say

    say(f"looking for {name} on the Hugging Face Hub", quiet)
    try:
        with hushed():
            return Path(snapshot_download(name, allow_patterns=[*_HUB_FILES, *(["*.py"] if trust else [])]))
    except RepositoryNotFoundError as error:
        raise InputError("model", name, "the Hub has no such public model, and there is no such folder") from error
    except LocalEntryNotFoundError as error:
        raise InputError(
            "model", name, "there is no such folder, and the Hugging Face Hub cannot be reached to look for it there"
        ) from error
    except HfHubHTTPError as error:
        raise InputError("model", name, f"the Hugging Face Hub refuses it ({reason(error)})") from error
    except OSError as error:
        if error.errno == 28:  # ENOSPC
            raise no_room(Path.home()) from error
        raise InputError("model", name, f"it cannot be downloaded from the Hub ({reason(error)})") from error


def _load(folder: Path, config: dict[str, Any], *, dtype: str, trust: bool, attention: str | None) -> Any:
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    if config.get("model_type") == "theory_lab":
        import theory_lab.models.lab  # noqa: F401  # makes the architecture known to transformers
    given = config.get("architectures")
    names = [name for name in given if isinstance(name, str)] if isinstance(given, list) else []
    wants_head = any(name in CAUSAL.values() or "CausalLM" in name for name in names)
    more = {} if attention is None else {"attn_implementation": attention}
    try:
        with hushed():
            settings = AutoConfig.from_pretrained(folder, trust_remote_code=trust, local_files_only=True)
            if attention is None and getattr(settings.get_text_config(), "attn_logit_softcapping", None) is not None:
                more = {"attn_implementation": "eager"}  # some versions default to sdpa, which leaves out the cap
            kind: Any = AutoModelForCausalLM if wants_head else AutoModel
            if not trust:  # code of a folder may build on whatever it likes
                files = header_of(sorted(folder.glob("*.safetensors")))
                check_built(folder, lambda: kind.from_config(settings, **more), files)
            model, report = kind.from_pretrained(
                folder,
                config=settings,
                dtype="auto" if dtype == "auto" else getattr(torch, dtype),
                use_safetensors=True,
                trust_remote_code=trust,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are in the report, and refused below with their names
                **more,
            )
    except ImportError as error:
        what = "attention" if attention else "model"
        raise InputError(
            what, attention or str(folder), f"a package that it needs is missing ({reason(error)})"
        ) from error
    except (InputError, MemoryError):
        raise
    except Exception as error:  # transformers, safetensors and a damaged file's place each raise their own
        if attention is not None and attention in str(error):
            raise InputError("attention", attention, f"it cannot be had here ({reason(error)})") from error
        raise InputError("model", str(folder), f"transformers cannot load it ({reason(error)})") from error
    check_filled(folder, report)
    return model


def _tokenizer(folder: Path, trust: bool) -> Any:
    from transformers import AutoTokenizer

    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    check_tokenizer(folder)
    # tokenizers raises bare Exception for a damaged file, and panics over some
    with foreign(lambda why: InputError("model", str(folder), f"its tokenizer cannot be loaded ({why})")), hushed():
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust, local_files_only=True)
        tokenizer("a", verbose=True)  # one that reads nothing is of no use, and may say so only now
        return tokenizer


def _check_words(dtype: str, device: str) -> None:
    if dtype not in _DTYPES:
        raise InputError("dtype", dtype, f"{', '.join(_DTYPES[:-1])} or {_DTYPES[-1]} is allowed")
    _check_name(device)


def _check_name(device: str) -> None:
    if not isinstance(device, str) or not re.fullmatch(r"cpu|(cuda|mps|xpu)(:\d+)?", device):
        raise InputError("device", device, "cpu, cuda or cuda:N is allowed")


def check_device(device: str) -> torch.device:
    """The device of that name, if it is there; before minutes go into loading.

    Raises
    ------
    InputError
        For another name, or a device that is not there.
    """
    import torch

    _check_name(device)
    if device == "cpu":
        return torch.device(device)
    kind, _, index = device.partition(":")
    module = getattr(torch, kind)
    if not module.is_available():
        raise InputError("device", device, f"no {kind} device is visible to PyTorch here; cpu is allowed")
    if index and int(index) >= module.device_count():
        raise InputError("device", device, f"{module.device_count()} such devices are here, counted from 0")
    return torch.device(device)


def _number(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else 0
