"""Configuration of the model with pluggable attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from theory_lab.errors import InputError

POSITIONS = ("rope", "nope", "nape", "half-rope")


class LabConfig(PreTrainedConfig):
    """What a model with pluggable attention is made of.

    Parameters
    ----------
    vocab_size : int
        Tokens.
    hidden_size, num_hidden_layers, num_attention_heads, head_dim, intermediate_size : int
        Width, layers, query heads, size of a head, inner width of the SwiGLU.
    num_key_value_heads : int, optional
        Key heads, a divisor of the query heads (grouped queries); as many if not given.
    max_position_embeddings : int
        The longest text that the model is trained for; longer ones are allowed.
    attention : str
        A mechanism of ``theory_lab.attention``, or ``tra-sharp`` and ``tda-sharp``: TRA and TDA with the threshold that
        is exact for cosines of unrelated directions.
    attention_parameters : mapping, optional
        Keyword arguments of the mechanism's class, such as ``{"beta": 0.8, "kappa": 1.0}``. A number stands for one
        learned value a head where the mechanism learns one a head.
    positions : {"rope", "nope", "nape", "half-rope"}
        Rotary positions; none; none in the first half of the heads and ALiBi in the others (NAPE, arXiv 2506.16640); or
        none in the first half of the heads and rotary ones in the others, for mechanisms that compare cosines.
    nape_slope : float
        The steepest of NAPE's slopes, in logits a token; each further head has half of the one before.
    rope_theta : float
        Base of the rotary frequencies.
    rope_ntk_factor : float
        How many times longer texts than those of training the frequencies are stretched for, at least 1 (NTK-aware
        scaling: the base times factor^(D / (D - 2)), which leaves the highest frequency alone).
    rms_norm_eps : float
        Of the norms before attention and SwiGLU. That of a mechanism's own output norm is in `attention_parameters`.
    initializer_range : float
        Standard deviation of embeddings and linear maps at the start; of maps back into the residual stream, divided by
        sqrt(2 layers).
    tie_word_embeddings : bool
        Whether the output layer is the embedding matrix.
    use_cache : bool
        Whether keys and values are kept when no gradient is wanted.

    Raises
    ------
    InputError
        For values out of range. The mechanism's parameters are checked when a model is made.
    """

    model_type = "theory_lab"
    keys_to_ignore_at_inference = ("past_key_values", "cache")

    def __init__(
        self,
        vocab_size: int = 2048,
        hidden_size: int = 192,
        num_hidden_layers: int = 4,
        num_attention_heads: int = 3,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        intermediate_size: int = 480,
        max_position_embeddings: int = 512,
        attention: str = "softmax",
        attention_parameters: Mapping[str, Any] | None = None,
        positions: str = "rope",
        nape_slope: float = 2.0,
        rope_theta: float = 10_000.0,
        rope_ntk_factor: float = 1.0,
        rms_norm_eps: float = 1e-6,
        initializer_range: float = 0.02,
        tie_word_embeddings: bool = True,
        use_cache: bool = True,
        bos_token_id: int = 0,
        eos_token_id: int = 1,
        pad_token_id: int = 2,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_attention_heads if num_key_value_heads is None else num_key_value_heads
        self.head_dim = hidden_size // max(num_attention_heads, 1) if head_dim is None else head_dim
        self.intermediate_size = intermediate_size
        self.max_position_embeddings = max_position_embeddings
        self.attention = attention
        self.attention_parameters = dict(attention_parameters or {})
        self.positions = positions
        self.nape_slope = nape_slope
        self.rope_theta = rope_theta
        self.rope_ntk_factor = rope_ntk_factor
        self.rms_norm_eps = rms_norm_eps
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        self._check()
        kwargs |= {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
        super().__init__(**{"tie_word_embeddings": tie_word_embeddings, **kwargs})

    @property
    def rotary(self) -> bool:
        """Whether any head has rotary positions."""
        return self.positions in ("rope", "half-rope")

    @property
    def free_heads(self) -> int:
        """Query heads without positions beside others with them: the first so many; 0 where all heads are alike."""
        return self.num_attention_heads // 2 if self.positions in ("nape", "half-rope") else 0

    def _check(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
            "intermediate_size", "max_position_embeddings",
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(name, value, "a whole number of at least 1 is allowed")
        if self.num_attention_heads % self.num_key_value_heads:
            raise InputError(
                "num_key_value_heads", self.num_key_value_heads, f"a divisor of {self.num_attention_heads} is allowed"
            )
        if self.positions not in POSITIONS:
            raise InputError("positions", self.positions, f"{', '.join(POSITIONS)} are allowed")
        if self.rotary and self.head_dim % 2:
            raise InputError("head_dim", self.head_dim, "rotary positions need an even number")
        group = self.num_attention_heads // self.num_key_value_heads
        if self.positions == "half-rope" and self.free_heads % group:
            # One key cannot be rotated for some of the queries that meet it.
            raise InputError(
                "num_key_value_heads", self.num_key_value_heads,
                f"half-rope needs key heads of one half alone, each of a divisor of {self.free_heads} query heads",
            )  # fmt: skip
        for name, low in (
            ("nape_slope", 0.0), ("rope_theta", 0.0), ("rope_ntk_factor", 1.0), ("rms_norm_eps", 0.0),
            ("initializer_range", 0.0),
        ):  # fmt: skip
            value = getattr(self, name)
            fits = isinstance(value, (int, float)) and math.isfinite(value) and value >= low
            if not fits or (value == 0 and name != "rms_norm_eps"):
                raise InputError(name, value, f"a number of at least {low:g} is allowed" if low else "above 0")
