"""What a model costs: memory before anything is allocated, and arithmetic against a device's limit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from theory_lab.errors import InputError

if TYPE_CHECKING:
    import torch

    from theory_lab.training.settings import TrainSettings

#: Dense bfloat16 operations a second of the matrix units, by a part of the device's name, as its maker states them.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40": 181e12, "4090": 165e12}


def parameter_count(config: Any) -> int:
    """Parameters of a model, a tied one once; nothing is allocated."""
    import torch

    from theory_lab.models.lab import LabForCausalLM

    with torch.device("meta"):
        model = LabForCausalLM(config)
    return sum(parameter.numel() for parameter in model.parameters())


def flops_per_token(config: Any, parameters: int, length: int, *, causal: bool = False) -> float:
    """Operations of training on one token: 6 a weight of a matrix product, and 12 L H D T of attention.

    Forward and backward, by the convention of PaLM (arXiv 2204.02311, appendix B), which counts every pair of places;
    `causal` counts only those that a causal model needs. A second view is counted with its projections alone.

    Parameters
    ----------
    config : LabConfig
    parameters : int
        All of the model's.
    length : int
        T, tokens of a sequence.
    """
    looked_up = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * length
    return 6.0 * (parameters - looked_up) + attention * (0.5 if causal else 1.0)


def peak(device: torch.device) -> float | None:
    """Dense bfloat16 operations a second of a GPU that is known here."""
    import torch

    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((value for part, value in PEAKS.items() if part in name), None)


def describe(config: Any, parameters: int, length: int, device: torch.device, world: int) -> dict[str, Any]:
    """Operations a token in both conventions, and the limit of the devices together, None where it is unknown."""
    limit = peak(device)
    return {
        "flops_per_token": flops_per_token(config, parameters, length),
        "flops_per_token_causal": flops_per_token(config, parameters, length, causal=True),
        "peak_flops": None if limit is None else limit * world,
    }


def check_memory(settings: TrainSettings, config: Any, parameters: int, device: torch.device, world: int) -> None:
    """Refuse what cannot fit: weights, gradients and AdamW's moments in float32, and the logits of one part of a step.

    Raises
    ------
    InputError
        It is a lower bound; what passes may still run out of memory.
    """
    sequences = settings.micro_batch // world or 1
    logits = sequences * settings.length * config.vocab_size * (2 if settings.dtype == "bfloat16" else 4)
    hidden = sequences * settings.length * config.hidden_size * config.num_hidden_layers * 4
    fixed = 16 * parameters
    need, free = fixed + logits + hidden, _free(device)
    if free is None or need <= free:
        return
    field, value = ("size", settings.size) if fixed > free // 2 else ("batch", str(settings.batch))
    advice = "a smaller size" if field == "size" else "a smaller batch, or more accumulation,"
    raise InputError(
        field,
        value,
        f"training needs at least {need / 2**30:.1f} GiB ({parameters / 1e6:,.0f} million parameters, batches of "
        f"{sequences} x {settings.length}) and {free / 2**30:.1f} GiB are free on {device}; {advice} is allowed",
    )


def _free(device: torch.device) -> int | None:
    """Bytes that are free, or None if the system does not say."""
    import torch

    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None
