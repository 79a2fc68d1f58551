"""The language model: pre-norm blocks of attention and SwiGLU, tied embeddings, no biases.

References
----------
Nguyen and Salazar, "Transformers without Tears", arXiv 1910.05895 (the small start of linear maps).
Radford et al., "Language Models are Unsupervised Multitask Learners" (residual maps start smaller, by the number of
layers).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from theory_lab.attention.base import Mechanism
from theory_lab.errors import InputError
from theory_lab.models.lab.attention import LabAttention
from theory_lab.models.lab.configuration import LabConfig
from theory_lab.models.lab.positions import rotations
from theory_lab.models.lab.windows import is_local

#: transformers renamed the field of its outputs.
_CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class LabMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LabConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(nn.functional.silu(gate) * up)


class LabBlock(GradientCheckpointingLayer):
    """One layer."""

    def __init__(self, config: LabConfig, layer_idx: int) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention = LabAttention(config, layer_idx)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LabMLP(config)

    def forward(
        self,
        x: Tensor,
        turned: tuple[Tensor, Tensor] | None = None,
        key_mask: Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        attended, weights = self.attention(self.input_norm(x), turned, key_mask, cache, **kwargs)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), weights


class LabPreTrainedModel(PreTrainedModel):
    """What the model with and without a head share."""

    config_class = LabConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LabBlock"]  # noqa: RUF012  # transformers' own convention
    _skip_keys_device_placement = ["cache", "past_key_values"]  # noqa: RUF012
    # The function a layer calls is its mechanism's: softmax has transformers' SDPA inside it.
    _supports_sdpa = False
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = True
    # A threshold or a temperature has too few digits in bfloat16.
    _keep_in_fp32_modules_strict = ["mechanism"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            _normal(module.weight, self.config.initializer_range)
        elif isinstance(module, nn.RMSNorm):
            module.weight.fill_(1.0)
        elif isinstance(module, nn.Linear):
            _normal(module.weight, self.config.initializer_range)
        # A mechanism starts where its constructor says. Residual maps, once their linear maps are drawn:
        if isinstance(module, LabBlock):
            depth = math.sqrt(2.0 * self.config.num_hidden_layers)
            for linear in (module.attention.o_proj, module.mlp.down_proj):
                _normal(linear.weight, self.config.initializer_range / depth)

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Parameters for an optimizer: matrices with weight decay; norms and all of the mechanisms' without.

        A decayed threshold or temperature would drift to 0 by the optimizer's will, not the data's.

        Parameters
        ----------
        weight_decay : float
            At least 0.

        Returns
        -------
        list of dict
            Two groups, ``params`` and ``weight_decay``, in the order of the model; every parameter once.
        """
        if not weight_decay >= 0:
            raise InputError("weight_decay", weight_decay, "a number of at least 0 is allowed")
        own = {id(p) for module in self.modules() if isinstance(module, Mechanism) for p in module.parameters()}
        matrices: list[Tensor] = []
        others: list[Tensor] = []
        for parameter in self.parameters():
            if parameter.requires_grad:
                (others if parameter.ndim < 2 or id(parameter) in own else matrices).append(parameter)
        return [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]


def _normal(weight: Tensor, deviation: float) -> None:
    """Draw, unless a checkpoint filled it."""
    if not getattr(weight, "_is_hf_initialized", False):
        weight.normal_(0.0, deviation)


class LabModel(LabPreTrainedModel):
    """Embeddings, layers and the last norm."""

    def __init__(self, config: LabConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([LabBlock(config, index) for index in range(config.num_hidden_layers)])
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @property
    def holds_maps(self) -> bool:
        """Whether, without gradients and padding, a layer holds its whole map of T x S weights at once.

        A mechanism whose rows depend on one another does; with any other, memory grows with T alone.
        """
        return not all(is_local(module) for module in self.modules() if isinstance(module, Mechanism))

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        cache: Any = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Hidden states of the tokens.

        Parameters
        ----------
        input_ids : Tensor
            (B, T) integers; or `inputs_embeds`, (B, T, C).
        attention_mask : Tensor, optional
            (B, S), nonzero at valid keys, S = T plus the length of the cache.
        position_ids : Tensor, optional
            (B, T) or (1, T). By default tokens are counted from the first valid one.
        past_key_values, cache : transformers.Cache, optional
            Two names of one argument.
        use_cache : bool, optional
            By default the configuration's where no gradient is wanted.
        output_hidden_states, output_attentions : bool, optional
            Also return those of every layer.

        Returns
        -------
        transformers.modeling_outputs.BaseModelOutputWithPast
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("input_ids", "none or both", "either input_ids or inputs_embeds is allowed")
        cache = past_key_values if cache is None else cache
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        batch, length = x.shape[:2]
        if use_cache is None:
            use_cache = self.config.use_cache and not torch.is_grad_enabled()
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            use_cache, cache = False, None
        if use_cache and cache is None:
            cache = DynamicCache()
        past = int(cache.get_seq_length()) if cache is not None else 0
        mask = _valid_keys(attention_mask, batch, length + past)
        turned = None
        if self.config.rotary:
            if position_ids is None:
                position_ids = _positions(mask, length, past, x.device)
            turned = rotations(
                position_ids.reshape(-1, length), self.config.head_dim, self.config.rope_theta,
                self.config.rope_ntk_factor,
            )  # fmt: skip
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        states, maps = [x], []
        for layer in self.layers:
            x, weights = layer(x, turned, mask, cache, output_attentions=bool(output_attentions))
            states.append(x)
            maps.append(weights)
        x = self.norm(x)
        states[-1] = x
        found = {
            "last_hidden_state": x,
            _CACHE: cache if use_cache or cache is not None else None,
            "hidden_states": tuple(states) if output_hidden_states else None,
            "attentions": tuple(maps) if output_attentions else None,
        }
        made = BaseModelOutputWithPast(**found)
        return made.to_tuple() if return_dict is False else made


def _valid_keys(mask: Tensor | None, batch: int, keys: int) -> Tensor | None:
    """Boolean (B, S); None where every key is valid, as far as that can be told without holding up a graph."""
    if mask is None:
        return None
    if mask.ndim != 2 or mask.shape[1] != keys or mask.shape[0] not in (1, batch):
        raise InputError("attention_mask", f"shape {tuple(mask.shape)}", f"({batch}, {keys}), nonzero at valid keys")
    valid = mask.bool().expand(batch, keys)
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return valid
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return valid
    return None if bool(valid.all()) else valid


def _positions(mask: Tensor | None, length: int, past: int, device: torch.device) -> Tensor:
    """(B or 1, T): places of the tokens among the valid ones, so that padding on the left moves nothing."""
    if mask is None:
        return torch.arange(past, past + length, device=device)[None, :]
    return (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]


class LabForCausalLM(LabPreTrainedModel, GenerationMixin):
    """The model with its language-model head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: LabConfig) -> None:
        super().__init__(config)
        self.model = LabModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Any = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Logits, and the loss if there are labels.

        Parameters
        ----------
        labels : Tensor, optional
            (B, T), aligned with the tokens: position t is scored against label t + 1; -100 is not scored.
        logits_to_keep : int or Tensor
            Only the last so many positions, or these; 0 for all.
        input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, cache
            Of :meth:`LabModel.forward`; so are ``output_hidden_states`` and ``output_attentions``.

        Returns
        -------
        transformers.modeling_outputs.CausalLMOutputWithPast
            `loss` is the mean over scored tokens in nats, `logits` (B, T, vocabulary).
        """
        kwargs.pop("return_dict", None)
        count = kwargs.pop("num_items_in_batch", None)
        found = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
            past_key_values=past_key_values, inputs_embeds=inputs_embeds, use_cache=use_cache, cache=cache, **kwargs,
        )  # fmt: skip
        x = found.last_hidden_state
        if isinstance(logits_to_keep, int):
            x = x[:, -logits_to_keep:] if logits_to_keep else x
        else:
            x = x[:, logits_to_keep]
        logits = self.lm_head(x)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, num_items_in_batch=count
            )
        more = {"hidden_states": found.hidden_states, "attentions": found.attentions, _CACHE: found.get(_CACHE)}
        made = CausalLMOutputWithPast(loss=loss, logits=logits, **more)
        return made.to_tuple() if return_dict is False else made
