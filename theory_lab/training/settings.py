"""What a training run is asked to do; checked before anything heavy is imported."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from theory_lab.errors import InputError, hint

DTYPES = ("auto", "float32", "bfloat16")
#: What may differ between the two halves of a resumed run: none of it changes what is computed. The corpus or task is
#: compared by what it says of itself.
FREE = ("device", "out", "save_every", "log_every", "keep", "graph", "tensorboard", "corpus", "task")
#: Fields of the model's configuration that something else decides.
_ELSEWHERE = {
    "size": "size is a setting of its own",
    "attention": "attention is a setting of its own",
    "attention_parameters": "they are given with the attention",
    "vocab_size": "the corpus or task decides it",
}


@dataclass(frozen=True)
class TrainSettings:
    """One training run.

    Parameters
    ----------
    attention : str
        A mechanism of :func:`theory_lab.attention.list_mechanisms`, or ``tra-sharp``, ``tda-sharp``.
    attention_parameters : mapping
        Keyword arguments of the mechanism, for example ``{"beta": 0.8, "eps": 1e-2}``.
    size : str
        Name of the model's shape: ``pico``, ``small``, ``paper``, ``recall``.
    model : mapping
        Fields of the model's configuration that replace those of its size.
    corpus : str or None
        Folder of a corpus; either this or `task`, or both where the task is made of words: its text surrounds them.
    task : str or None
        A task that is generated on the fly, with its parameters as in ``recall:queries=8``, or several that take turns,
        as in ``passkey + multi-needle:needles=4``. A task of words takes the tokenizer of `start`, or else that of
        `corpus`.
    steps : int
        Optimizer steps, at least 1.
    batch : int
        Sequences of one optimizer step, over all processes and all parts of an accumulated step.
    length : int
        Tokens T of a sequence.
    accumulation : int
        Parts that one step's sequences are cut into, to save memory; the gradient is that of the whole step.
    lr, lr_min : float
        Learning rate after the warm-up, and at the last step; a cosine between them.
    warmup : int or None
        Steps of linear warm-up; None is a twentieth of `steps`.
    weight_decay : float
        Of AdamW, on the parameters that the model names for it.
    betas : tuple of float
        Of AdamW.
    adam_eps : float
        Of AdamW.
    clip : float
        Largest norm of the gradient; ``inf`` for none.
    seed : int
        Of the initial weights and of the data.
    dtype : str
        ``bfloat16`` computes matrix products in bfloat16 with float32 weights, ``float32`` everything in float32;
        ``auto`` is bfloat16 on a GPU and float32 elsewhere.
    device : str
        ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
    start : str or None
        A trained model to start from, of the same architecture and vocabulary: its folder, or a name of the zoo.
    eval_every, eval_batches : int
        Steps between evaluations (0: only at the end), and held-out batches of each.
    log_every : int
        Steps between two rows of ``log.csv``.
    save_every : int or None
        Steps between checkpoints; 0 keeps none on the way, None is a tenth of `steps`.
    keep : int
        Checkpoints that are kept, the newest ones.
    graph : bool or None
        Capture the whole step in a CUDA graph; None does so wherever it can be done.
    compile : bool
        Compile the model with ``torch.compile``.
    tensorboard : bool
        Also write TensorBoard events, if that package is installed.
    out : str or None
        The run's folder; None writes nothing.
    """

    attention: str = "softmax"
    attention_parameters: Mapping[str, Any] = field(default_factory=dict)
    size: str = "pico"
    model: Mapping[str, Any] = field(default_factory=dict)
    corpus: str | None = None
    task: str | None = None
    steps: int = 200
    batch: int = 8
    length: int = 256
    accumulation: int = 1
    lr: float = 1e-3
    lr_min: float = 1e-4
    warmup: int | None = None
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: float = 1e-8
    clip: float = 1.0
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    start: str | None = None
    eval_every: int = 0
    eval_batches: int = 8
    log_every: int = 1
    save_every: int | None = None
    keep: int = 2
    graph: bool | None = None
    compile: bool = False
    tensorboard: bool = True
    out: str | None = None

    def __post_init__(self) -> None:
        self._check_kinds()
        for name in ("steps", "batch", "accumulation", "eval_batches", "log_every", "keep"):
            _whole(name, getattr(self, name), 1)
        _whole("eval_every", self.eval_every, 0)
        if self.save_every is not None:
            _whole("save_every", self.save_every, 0)
        _whole("length", self.length, 2)
        _whole("seed", self.seed, 0)
        if self.seed >= 1 << 63:
            raise InputError("seed", self.seed, "an integer from 0 to 2^63 - 1 is allowed")
        if self.warmup is not None:
            _whole("warmup", self.warmup, 0)
        if self.warmup is not None and self.warmup >= self.steps:
            raise InputError("warmup", self.warmup, f"fewer than the {self.steps} steps are allowed")
        if self.batch % self.accumulation:
            raise InputError("accumulation", self.accumulation, f"a divisor of the batch of {self.batch} is allowed")
        _number("lr", self.lr, 0.0, open_low=True)
        _number("lr-min", self.lr_min, 0.0, self.lr)
        _number("weight-decay", self.weight_decay, 0.0)
        _number("adam-eps", self.adam_eps, 0.0, open_low=True)
        _number("clip", self.clip, 0.0, math.inf, open_low=True)
        if len(self.betas) != 2:
            raise InputError("betas", self.betas, "two numbers from 0 to below 1 are allowed")
        for beta in self.betas:
            if not 0 <= _number("betas", beta, 0.0, 1.0) < 1:
                raise InputError("betas", beta, "numbers from 0 to below 1 are allowed")
        if self.dtype not in DTYPES:
            raise InputError("dtype", self.dtype, f"{hint(self.dtype, DTYPES)}known: {', '.join(DTYPES)}")
        if self.corpus is None and self.task is None:
            raise InputError("corpus", "neither", "either a corpus or a task is allowed")
        if self.corpus is not None and self.task is not None:
            from theory_lab.tasks.registry import takes_text

            if not takes_text(self.task):
                raise InputError("corpus", "both", "either a corpus or a task is allowed, or both for a task of words")
        for name, instead in _ELSEWHERE.items():
            if name in self.model:
                raise InputError("model", name, f"{instead}; other fields of the configuration are allowed")

    def _check_kinds(self) -> None:
        """Settings may come from a file, which holds anything under any name."""
        for name in ("attention", "size", "dtype", "device"):
            if not isinstance(getattr(self, name), str):
                raise InputError(name, getattr(self, name), "a name is allowed")
        for name in ("corpus", "task", "start", "out"):
            if not isinstance(getattr(self, name), (str, Path, type(None))):
                raise InputError(name, getattr(self, name), "a text is allowed")
        for name in ("model", "attention_parameters"):
            if not isinstance(getattr(self, name), Mapping):
                raise InputError(name, getattr(self, name), "a table of names and values is allowed")
        for name in ("graph", "compile", "tensorboard"):
            if not isinstance(getattr(self, name), (bool, type(None))):
                raise InputError(name, getattr(self, name), "true or false is allowed")
        if not isinstance(self.betas, (tuple, list)):
            raise InputError("betas", self.betas, "two numbers are allowed")

    @property
    def micro_batch(self) -> int:
        """Sequences of one part of a step, over all processes."""
        return self.batch // self.accumulation

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.batch * self.length

    @property
    def save_steps(self) -> int:
        """Steps between checkpoints; 0 for none."""
        return max(self.steps // 10, 1) if self.save_every is None else self.save_every

    @property
    def warmup_steps(self) -> int:
        """Steps of the warm-up."""
        return self.steps // 20 if self.warmup is None else self.warmup

    def learning_rate(self, step: int) -> float:
        """Learning rate of update `step`, from 0: linear warm-up, then a cosine from `lr` to `lr_min`."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / (self.warmup_steps + 1)
        span = max(self.steps - 1 - self.warmup_steps, 1)
        share = min((step - self.warmup_steps) / span, 1.0)
        return self.lr_min + (self.lr - self.lr_min) * 0.5 * (1.0 + math.cos(math.pi * share))

    def describe(self) -> dict[str, Any]:
        """Every field as JSON can hold it."""
        fields = dataclasses.asdict(self)
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
        return {**plain, "clip": "inf" if math.isinf(self.clip) else self.clip}

    def identity(self) -> dict[str, Any]:
        """What decides the numbers of a run; a resumed run must agree in all of it."""
        return {name: value for name, value in self.record().items() if name not in FREE}

    def record(self) -> dict[str, Any]:
        """:meth:`describe` without places: folders by name, so that what is kept holds on any machine."""
        kept = {**self.describe(), "out": None}
        return {**kept, **{name: kept[name] and Path(kept[name]).name for name in ("corpus", "start")}}


def _whole(name: str, value: Any, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise InputError(name.replace("_", "-"), value, f"a whole number of at least {low} is allowed")
    return value


def _number(name: str, value: Any, low: float, high: float = math.inf, *, open_low: bool = False) -> float:
    bounds = f"a number {'above' if open_low else 'of at least'} {low:g}" + (
        f" and at most {high:g}" if high < math.inf else ""
    )
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise InputError(name, value, f"{bounds} is allowed")
    if not low <= value <= high or (open_low and value == low):
        raise InputError(name, value, f"{bounds} is allowed")
    return float(value)
