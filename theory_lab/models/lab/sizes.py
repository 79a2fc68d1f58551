"""Named sizes of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from theory_lab.errors import InputError, hint
from theory_lab.models.lab.configuration import LabConfig

#: pico is at most 2.45 million parameters with two views and 2048 tokens: 5 MB in bfloat16. paper is 162 million with
#: one view and GPT-2's 50,257 tokens. recall is for tasks without much of a vocabulary.
SIZES: dict[str, dict[str, Any]] = {
    "recall": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 320},
    "pico": {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 480},
    "small": {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 1280},
    "paper": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 2048,
        "tie_word_embeddings": False,
    },
}


def make_config(
    size: str,
    attention: str,
    *,
    vocab_size: int,
    attention_parameters: Mapping[str, Any] | None = None,
    positions: str = "rope",
    max_positions: int = 512,
    **overrides: Any,
) -> LabConfig:
    """Configuration of a model of a named size.

    Parameters
    ----------
    size : {"recall", "pico", "small", "paper"}
    attention : str
        See :class:`LabConfig`, as for the other parameters.
    vocab_size : int
    attention_parameters : mapping, optional
        What is left out starts, for TDA, at beta 0.5, kappa 1, p 2, eps 1e-1, lambda 0.5 (docs/train.md says why).
    positions : str
    max_positions : int
        Length of the texts in training.
    **overrides
        Other fields of :class:`LabConfig`, such as ``num_hidden_layers=6``.

    Raises
    ------
    InputError
        For a size, a mechanism, a parameter of it or a field that there is not.
    """
    import inspect

    from theory_lab.models.lab.mechanisms import build_mechanism, start_parameters

    if size not in SIZES:
        raise InputError("size", size, f"{hint(str(size), SIZES)}{', '.join(SIZES)} are allowed")
    fields = [name for name in inspect.signature(LabConfig.__init__).parameters if name not in ("self", "kwargs")]
    for name in overrides:
        if name not in fields:
            raise InputError("override", name, f"{hint(name, fields)}fields are {', '.join(fields)}")
    max_positions = overrides.pop("max_position_embeddings", max_positions)  # the field's own name
    settings = {"head_dim": 64, **SIZES[size], **overrides}
    if "hidden_size" in overrides and "num_attention_heads" not in overrides and "head_dim" not in overrides:
        width = settings["hidden_size"]
        if not isinstance(width, int) or width % 64:
            raise InputError("hidden_size", width, "a multiple of 64, or num_attention_heads and head_dim beside it")
        settings["num_attention_heads"] = width // 64
    config = LabConfig(
        vocab_size=vocab_size,
        attention=attention,
        # Written out, so that a saved model does not change with our defaults.
        attention_parameters={**start_parameters(str(attention)), **(attention_parameters or {})},
        positions=positions,
        max_position_embeddings=max_positions,
        **settings,
    )
    build_mechanism(config, 0)  # refuses what the mechanism does not take, before anything is allocated
    return config
