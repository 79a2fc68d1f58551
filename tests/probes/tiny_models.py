"""Tiny random models, one an architecture: two or more layers, wide enough to have what makes it special."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf

VOCABULARY = 61

_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,  # no power of two
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}

#: Architectures by name: the configuration.
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaConfig(**_LLAMA),
    "qwen2": lambda: tf.Qwen2Config(**_LLAMA),
    "qwen3": lambda: tf.Qwen3Config(**_LLAMA),
    "mistral": lambda: tf.MistralConfig(**_LLAMA, sliding_window=5),
    "gemma2": lambda: tf.Gemma2Config(
        **_LLAMA, sliding_window=5, query_pre_attn_scalar=9, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "gemma3": lambda: tf.Gemma3TextConfig(**{**_LLAMA, "num_hidden_layers": 6}, sliding_window=5),
    "gpt2": lambda: tf.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=24,
        n_layer=2,
        n_head=4,
        n_positions=256,
        bos_token_id=1,
        eos_token_id=2,
        scale_attn_by_inverse_layer_idx=True,
    ),
    "gpt-neox": lambda: tf.GPTNeoXConfig(
        **{key: value for key, value in _LLAMA.items() if key not in ("num_key_value_heads", "head_dim")}
    ),
    "phi3": lambda: tf.Phi3Config(**_LLAMA, sliding_window=5),
    "gpt-oss": lambda: tf.GptOssConfig(
        **_LLAMA,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "opt": lambda: tf.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        ffn_dim=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        word_embed_proj_dim=24,
        pad_token_id=0,
    ),
    "bert": lambda: tf.BertConfig(**_BERT),
    "modernbert": lambda: tf.ModernBertConfig(
        **{**_BERT, "num_hidden_layers": 3},
        local_attention=6,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    ),
}

ENCODERS = ("bert", "modernbert")


def build(name: str, attention: str = "eager", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model of the architecture, in evaluation mode; the same one for the same arguments."""
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(7)
    kind = tf.AutoModel if name in ENCODERS else tf.AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation=attention, dtype=dtype)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim > 1 or path.endswith("sinks"):
                parameter.normal_(0.0, 0.3)  # the default of 0.02 would make every attention row uniform
    return model.eval()


def texts(batch: int = 3, length: int = 17, padding: str = "none") -> dict[str, torch.Tensor]:
    """Random token ids, with texts of different lengths where there is padding."""
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row, pad in enumerate((0, 4, length - 1)[:batch]):
        if padding == "left":
            mask[row, :pad] = 0
        elif padding == "right":
            mask[row, length - pad :] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}
