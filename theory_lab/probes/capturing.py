"""Run a model once over a text, and keep the queries and keys of its layers."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theory_lab.errors import InputError
from theory_lab.probes.maps import Captured
from theory_lab.probes.texts import Text, as_text, special_tokens, tokenize

if TYPE_CHECKING:
    from theory_lab.models import LoadedModel
    from theory_lab.probes.calls import AttentionCall


def capture(
    model: str | Path | LoadedModel,
    text: str | Text,
    *,
    length: int | None = None,
    layers: Iterable[int] | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    attention: str | None = None,
    trust_remote_code: bool = False,
    on_layer: Callable[[int], None] | None = None,
) -> Captured:
    """Run a model once over a text and keep the queries and keys of its layers.

    Parameters
    ----------
    model : str, path or LoadedModel
        As for :func:`theory_lab.models.load_model`.
    text : str or Text
        The words themselves.
    length : int, optional
        Take the text's first tokens up to so many, special ones included. Default: the whole text.
    layers : iterable of int, optional
        0-based; all by default.
    device, dtype, attention, trust_remote_code
        As for ``load_model``; of no effect if a LoadedModel is given.
    on_layer : callable, optional
        Called with the number of layers captured so far.

    Returns
    -------
    Captured

    Raises
    ------
    InputError
        A model that cannot be loaded or watched, no tokenizer, an empty text, a text shorter than ``length``.
    """
    import torch

    from theory_lab.models import LoadedModel, load_model
    from theory_lab.probes.watching import watch

    if isinstance(model, LoadedModel):
        loaded = model
    else:
        loaded = load_model(
            model, device=device, dtype=dtype, attention=attention, trust_remote_code=trust_remote_code
        )  # fmt: skip
    ids = _ids(loaded, text if isinstance(text, Text) else as_text("text", text), length)
    calls: dict[int, AttentionCall] = {}

    def keep(call: AttentionCall) -> None:
        calls[call.layer] = dataclasses.replace(call, v=call.v[:, :, :0])
        if on_layer is not None:
            on_layer(len(calls))

    takes = inspect.signature(loaded.backbone.forward).parameters
    more = {"use_cache": False} if "use_cache" in takes else {}
    try:
        with torch.no_grad(), watch(loaded.model, keep, layers=layers) as seen:
            loaded.backbone(input_ids=torch.tensor([ids], device=loaded.device), **more)
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            words = str(error).lower()
            if "alloc" not in words or "memory" not in words:
                raise
        raise InputError(
            "length", len(ids), "out of memory: a shorter length, fewer layers or dtype bfloat16 needs less"
        ) from None
    if not calls:
        seen.check()
    return Captured(loaded.name, _words(loaded.tokenizer, ids), tuple(ids), calls, dict(seen.unseen))


def _ids(loaded: LoadedModel, text: Text, length: int | None) -> list[int]:
    if loaded.tokenizer is None:
        raise InputError("model", loaded.name, "it has no tokenizer")
    front, back = special_tokens(loaded.tokenizer)
    tokens = tokenize(loaded.tokenizer, text)
    ids = [*front, *tokens, *back]
    if length is None:
        return ids
    least = len(front) + len(back) + 1
    if not least <= length <= len(ids):
        raise InputError("length", length, f"{least} to {len(ids):,} tokens are allowed with the text '{text.name}'")
    return [*front, *tokens[: length - least + 1], *back]


def _words(tokenizer: Any, ids: list[int]) -> tuple[str, ...]:
    """Each token as text; one that is part of a character stays in the tokenizer's own spelling."""
    known: dict[int, str] = {}
    for number in set(ids):
        word = tokenizer.decode([number], clean_up_tokenization_spaces=False)
        known[number] = word if "\ufffd" not in word else str(tokenizer.convert_ids_to_tokens(number))
    return tuple(known[number] for number in ids)
