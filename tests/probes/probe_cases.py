"""What the tests of probing share: a tiny model with a tokenizer of letters, and measures of a map held in full."""

from __future__ import annotations

import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from theory_lab.probes import measures

WORDS = (
    "Threshold attention keeps the keys whose cosine exceeds a level that grows with the length of the row, and "
    "gives every other key a weight of exactly nothing. "
)


class Letters:
    """A tokenizer of single letters, with a token in front as BOS if asked for."""

    def __init__(self, bos: bool = False) -> None:
        self.bos = bos

    def __call__(self, text: str, add_special_tokens: bool = True, **_: object) -> dict[str, list[int]]:
        ids = [1 + zlib.crc32(letter.encode()) % 60 for letter in text]
        return {"input_ids": [0, *ids] if self.bos and add_special_tokens else ids}


def tiny_llama(*, bos: bool = False, seed: int = 0, **more: object) -> SimpleNamespace:
    """A random Llama of 2 layers, 4 heads on 2 key heads, as ``load_model`` gives one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    settings = {"max_position_embeddings": 512, "num_key_value_heads": 2, "num_hidden_layers": 2, **more}
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=4,
        attn_implementation="sdpa", **settings,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for name, value in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            value.mul_(12.0)  # random weights attend evenly; these do not
    return SimpleNamespace(
        model=model, backbone=model.base_model, tokenizer=Letters(bos), name="tiny", layers=2, heads=4, key_heads=2,
        head_dim=8, max_positions=settings["max_position_embeddings"], causal=True, folder=Path("tiny"),
    )  # fmt: skip


def map_measures(weights: np.ndarray, seen: np.ndarray, near_zero: tuple[float, ...]) -> dict[str, np.ndarray]:
    """The measures of whole maps (H, T, S), straight from their definitions; ``seen`` (T, S)."""
    size = np.abs(weights.astype(np.float64))
    visible = seen.sum(-1)
    entropy = measures.entropy_of(size)
    column, rows = size.sum(-2), seen.sum(-2)
    found = {
        "g_sink_ratio_1": measures.g_sink_ratio(column, 1),
        "sink_weight_1": column[:, 0] / rows[0],
        "entropy": entropy.mean(-1),
        "normalized_entropy": np.nanmean(measures.normalized_entropy(entropy, visible), -1),
        "max_abs": size.max((-2, -1)),
        "dead_rows": (size.sum(-1) == 0).mean(-1),
    }
    for eps in near_zero:
        found[f"near_zero_{eps:g}"] = ((size < eps) & seen).sum((-2, -1)) / visible.sum()
    return found
