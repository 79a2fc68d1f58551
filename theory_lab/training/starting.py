"""The model that a training starts from: where it lies, what it is made of, its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from theory_lab.errors import InputError, hint
from theory_lab.outside import expanded, read_json
from theory_lab.training.settings import TrainSettings

#: Fields of a configuration that are no choice of a training, or a setting of their own.
_NOT_MODEL = ("vocab_size", "attention", "attention_parameters", "use_cache", "bos_token_id", "eos_token_id",
              "pad_token_id")  # fmt: skip


def zoo_names() -> list[str]:
    """Names of the models that come with the package."""
    from theory_lab.models.catalog import list_models

    return [model.name for model in list_models() if model.home is not None]


def start_folder(start: str) -> Path:
    """The folder of a model to start from: one of the zoo by its name, or a folder.

    Raises
    ------
    InputError
        If there is neither.
    """
    from theory_lab.models.catalog import list_models

    known = {model.name: model.home for model in list_models() if model.home is not None}
    home = known.get(start)
    if home is not None:
        return home
    folder = expanded(start)
    if not folder.is_dir():
        allowed = f"{hint(start, known)}the folder of a trained model, or one of {', '.join(known)}, is allowed"
        raise InputError("start", start, allowed)
    return folder


def start_tokenizer(start: str) -> Path | None:
    """Its ``tokenizer.json``, if it has one."""
    file = start_folder(start) / "tokenizer.json"
    return file if file.is_file() else None


def inherited(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a training, with what they leave open as in the model that it starts from.

    Parameters
    ----------
    given : mapping
        Fields of :class:`~theory_lab.training.settings.TrainSettings`. Without ``start`` they are returned as they are.

    Returns
    -------
    dict
        The attention, its parameters and every field of the configuration are those of the start, unless they are
        given. Its positions are those of the start if the training's texts are not longer.

    Raises
    ------
    InputError
        If the start is no model of ours.
    """
    start = given.get("start")
    if start is None:
        return dict(given)
    from theory_lab.models.lab.sizes import SIZES

    config = _config(str(start))
    made = {"attention": config["attention"], **given}
    if made["attention"] == config["attention"]:
        # Values that are learned come with the weights; the others are these.
        own = dict(config.get("attention_parameters") or {})
        made["attention_parameters"] = {**own, **given.get("attention_parameters", {})}
    if "size" in given:
        return made
    fitting = [name for name, shape in SIZES.items() if all(config.get(key) == value for key, value in shape.items())]
    model = {name: config[name] for name in _fields() if name in config}
    if made.get("length", TrainSettings.length) > int(config.get("max_position_embeddings", 0)):
        model.pop("max_position_embeddings", None)
    return {**made, "size": (fitting or ["pico"])[0], "model": {**model, **given.get("model", {})}}


def _fields() -> list[str]:
    import inspect

    from theory_lab.models.lab.configuration import LabConfig

    names = inspect.signature(LabConfig.__init__).parameters
    return [name for name in names if name not in ("self", "kwargs", *_NOT_MODEL)]


def _config(start: str) -> dict[str, Any]:
    folder = start_folder(start)
    try:
        found = read_json(folder / "config.json")
    except (OSError, ValueError) as error:
        raise InputError("start", start, f"its config.json cannot be read ({error})") from None
    if not isinstance(found, dict) or found.get("model_type") != "theory_lab" or "attention" not in found:
        raise InputError("start", start, "it belongs to another architecture: a model of theory-lab train is allowed")
    return found
