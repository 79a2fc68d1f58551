"""What the attention of every layer does at an evaluation: rows of ``layers.csv``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from theory_lab.tasks.source import I64

#: Columns after ``step``; empty where a mechanism has no such thing.
MEASURES = (
    "layer", "dead_rows", "dead_heads", "zeros", "survivors", "correlation", "beta", "lam", "s", "theta", "tau",
    "alpha",
)  # fmt: skip
#: Texts that are looked at.
TEXTS = 4


def measure_layers(model: Any, tokens: I64, dtype: str) -> list[dict[str, float]]:
    """Numbers of every layer on the first held-out texts; see :func:`theory_lab.models.lab.attention_state`.

    Parameters
    ----------
    model : LabForCausalLM
    tokens : ndarray of int64, shape (sequences, length)
    dtype : str
        In which the model is trained.
    """
    import torch

    from theory_lab.models.lab import attention_state
    from theory_lab.training.stepping import autocast

    device = next(model.parameters()).device
    with autocast(device, dtype):
        found = attention_state(model, torch.from_numpy(tokens[:TEXTS]).to(device))
    return [
        {name: int(row[name]) if name == "layer" else row[name] for name in MEASURES if name in row} for row in found
    ]
