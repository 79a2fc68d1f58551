"""A model takes a test, at any length that its attention can be computed for.

Logits are computed at the scored positions alone. Long texts go through the model in pieces: a piece's queries meet
the keys of all before it in the model's key-value cache, so that no attention map is larger than piece times text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from theory_lab.errors import InputError
from theory_lab.models.loading import LoadedModel
from theory_lab.outside import read_json
from theory_lab.settings import Progress, Silent
from theory_lab.tasks.base import Task, whole
from theory_lab.tasks.scoring import by_question, check_level, clustered_mean, proportion
from theory_lab.tasks.source import IGNORED, Examples

if TYPE_CHECKING:
    import pandas as pd

#: Attention weights of one layer in memory at a time; an implementation holds a few times as many numbers.
_WEIGHTS_CPU, _WEIGHTS_GPU = 1 << 24, 1 << 27
#: Tokens of a forward pass, for what grows with them alone.
_TOKENS = 1 << 17
_LEAST_PIECE = 16


@dataclass(frozen=True)
class Scores:
    """Answers to the questions of one length; arrays of shape (sequences,)."""

    right: np.ndarray
    asked: np.ndarray
    losses: np.ndarray
    tokens: np.ndarray
    not_finite: int
    piece: int


@dataclass(frozen=True)
class TaskResult:
    """How well a model did.

    Attributes
    ----------
    rows : DataFrame
        One row a length; see :func:`evaluate`.
    notes : list of str
        What the reader should know.
    """

    rows: pd.DataFrame
    notes: list[str]


def evaluate(
    model: LoadedModel,
    task: Task,
    lengths: Sequence[int],
    *,
    samples: int = 200,
    most_tokens: int | None = None,
    chunk: int | None = None,
    level: float = 0.95,
    progress: Progress | None = None,
    on_row: Callable[[TaskResult], None] | None = None,
) -> TaskResult:
    """Let a model take a test at several lengths.

    An answer is right if each of its tokens is the likeliest, given the true tokens before it: then greedy decoding
    writes the same answer. Of several questions in a text, the later ones see the true answers to the earlier.

    Parameters
    ----------
    model : LoadedModel
        A causal language model.
    task : Task
    lengths : sequence of int
        Tokens of a sequence.
    samples : int
        Sequences a length.
    most_tokens : int, optional
        Fewer sequences of long texts: as many as have so many tokens together, and at least one.
    chunk : int, optional
        Tokens a piece; 0 for whole texts; by default whole texts where the model says that it holds no attention maps
        (most of Theory Lab's own), else as many as keep the maps within 0.25 GiB on a CPU and 2 GiB on a GPU at 16
        bytes a weight.
    level : float
        Confidence level of each interval.
    progress : Progress, optional
    on_row : callable, optional
        Called with the result so far whenever a length is finished.

    Returns
    -------
    TaskResult
        Columns: ``task``, ``parameters`` (JSON), ``model``, ``length``, ``samples``; ``questions``, ``right``,
        ``accuracy``, ``low``, ``high``, ``method`` of questions; ``sequences_right``, ``sequence_accuracy``,
        ``sequence_low``, ``sequence_high`` of whole sequences (see :mod:`theory_lab.tasks.scoring`); ``loss`` in nats
        a scored token, with its standard error ``loss_se``, clustered by sequence; ``level``, ``seed``, ``chunk``,
        ``device``, ``dtype``, ``seconds``.

    Raises
    ------
    InputError
        If the model is no causal language model or has another vocabulary, the task has no sequences of a length, or
        one does not fit into memory.
    """
    import pandas as pd

    level = check_level(level)
    samples = whole("samples", samples, 1)
    most_tokens = None if most_tokens is None else whole("most_tokens", most_tokens, 1)
    chunk = None if chunk is None else whole("chunk", chunk, 0)
    lengths = [whole("length", length, 1) for length in lengths]
    if not lengths:
        raise InputError("length", "none", "at least one length is needed")
    for length in lengths:
        task.check_length(length)
    head = _check_model(model, task, max(lengths))
    first = torch.from_numpy(_sequences(task, range(1), lengths[0]).tokens[:, :16])
    head.check(model, first.to(model.device))
    progress = progress or Silent()
    rows: list[dict[str, Any]] = []
    notes = _beyond(model, lengths)
    counts = [samples if most_tokens is None else max(1, min(samples, most_tokens // length)) for length in lengths]
    work = sum(count * _cost(length) for count, length in zip(counts, lengths, strict=True))
    progress.start(sum(counts), 0, float(work))
    for count, length in zip(counts, lengths, strict=True):
        started = time.perf_counter()
        scores = _take(model, head, task, length, count, chunk, progress)
        seconds = time.perf_counter() - started
        rows.append(_row(model, task, length, count, scores, level, seconds))
        if scores.not_finite:
            notes.append(f"length {length:,}: {scores.not_finite:,} predictions are not finite and count as wrong")
        if on_row is not None:
            on_row(TaskResult(pd.DataFrame(rows), notes))
    return TaskResult(pd.DataFrame(rows), notes)


def _cost(length: int) -> float:
    return length * (1.0 + length / 2048.0)


def _row(
    model: LoadedModel, task: Task, length: int, samples: int, scores: Scores, level: float, seconds: float
) -> dict[str, Any]:
    answers = proportion(scores.right, scores.asked, level)
    perfect = scores.right == scores.asked
    whole_ones = proportion(perfect, np.ones_like(scores.asked), level)
    loss, error = clustered_mean(scores.losses, scores.tokens)
    return {
        "task": task.name,
        "parameters": json.dumps(_parameters(task)),
        "model": model.name,
        "length": length,
        "samples": samples,
        "questions": int(scores.asked.sum()),
        "right": int(scores.right.sum()),
        "accuracy": answers.estimate,
        "low": answers.low,
        "high": answers.high,
        "method": answers.method,
        "sequences_right": int(perfect.sum()),
        "sequence_accuracy": whole_ones.estimate,
        "sequence_low": whole_ones.low,
        "sequence_high": whole_ones.high,
        "loss": loss,
        "loss_se": error,
        "level": level,
        "seed": task.seed,
        "chunk": scores.piece,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "seconds": seconds,
    }


def _parameters(task: Task) -> dict[str, Any]:
    """Of a task, with the corpus whose text it takes."""
    about = task.describe()
    return {**about["parameters"], **({"corpus": about["corpus"]} if "corpus" in about else {})}


def _check_model(model: LoadedModel, task: Task, longest: int) -> Head:
    """Its language-model head; InputError if it cannot take the test."""
    head = Head.of(model)
    if head.vocabulary < task.vocab_size:
        raise InputError(
            "model",
            model.name,
            f"its vocabulary has {head.vocabulary:,} tokens and task {task.label} needs {task.vocab_size:,}: "
            "a model trained on the task is needed",
        )
    if model.max_positions is not None and longest > model.max_positions and _learned(model):
        raise InputError("length", longest, f"at most {model.max_positions:,}: the model has no position beyond")
    return head


def _learned(model: LoadedModel) -> bool:
    """Whether positions are rows of a table, so that there are no more of them."""
    words = model.model.get_input_embeddings()
    most = model.max_positions or 0
    return any(
        isinstance(module, torch.nn.Embedding) and module is not words and most <= module.num_embeddings <= most + 8
        for module in model.model.modules()
    )


def _beyond(model: LoadedModel, lengths: Sequence[int]) -> list[str]:
    most = model.max_positions
    if most is None or max(lengths) <= most:
        return []
    return [f"lengths above {most:,} are beyond the positions that the model's configuration names"]


def _take(
    model: LoadedModel, head: Head, task: Task, length: int, samples: int, chunk: int | None, progress: Progress
) -> Scores:
    """All sequences of one length."""
    heads = max(model.heads, 1)
    most = _WEIGHTS_CPU if model.device.type == "cpu" else _WEIGHTS_GPU
    maps = getattr(model.backbone, "holds_maps", True)
    if chunk == 0 or (chunk is None and not maps):
        piece = length
    else:
        piece = min(length, chunk or max(_LEAST_PIECE, _power(most // (heads * length))))
    together = max(1, min(samples, most // (heads * piece * length) if maps else samples, _TOKENS // length))
    right, asked = np.zeros(samples, dtype=np.int64), np.zeros(samples, dtype=np.int64)
    losses, tokens = np.zeros(samples), np.zeros(samples, dtype=np.int64)
    not_finite = at = 0
    while at < samples:
        numbers = range(at, min(at + together, samples))
        examples = _sequences(task, numbers, length)
        try:
            best, surprise = predict(model, head, examples, piece)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "memory" not in str(error).lower():
                raise
            together, piece = _smaller(together, piece, length, model, error)
            if model.device.type == "cuda":
                torch.cuda.empty_cache()
            continue
        for row, number in enumerate(numbers):
            scored = examples.labels[row] != IGNORED
            right[number], asked[number] = by_question(best[row] == examples.labels[row], examples.queries[row])
            finite = np.isfinite(surprise[row][scored])
            not_finite += int((~finite).sum())
            losses[number], tokens[number] = surprise[row][scored].sum(), scored.sum()
        at = numbers.stop
        progress.advance(len(numbers), len(numbers) * _cost(length))
    return Scores(right, asked, losses, tokens, not_finite, piece)


def _sequences(task: Task, numbers: range, length: int) -> Examples:
    """Sequences by their number, which says everything about them: how many are taken at a time changes nothing."""
    drawn = [task.examples(number, 1, length) for number in numbers]
    return Examples(*(np.concatenate(parts) for parts in zip(*drawn, strict=True)))


def _power(number: int) -> int:
    """The largest power of two that is not above a number; 1 below 1."""
    return 1 << max(number.bit_length() - 1, 0)


def _smaller(together: int, piece: int, length: int, model: LoadedModel, error: BaseException) -> tuple[int, int]:
    """Half as many sequences, then half the piece; InputError when there is nothing left to halve."""
    if together > 1:
        return together // 2, piece
    if piece > _LEAST_PIECE:
        return 1, max(_LEAST_PIECE, _power((piece - 1) // 2 or 1))
    raise InputError("length", length, f"it does not fit the memory of {model.device}: shorter texts do") from error


@torch.inference_mode()
def predict(model: LoadedModel, head: Head, examples: Examples, piece: int) -> tuple[np.ndarray, np.ndarray]:
    """What a model says at the scored positions.

    Parameters
    ----------
    model : LoadedModel
    head : Head
    examples : Examples
        Of shape (size, length).
    piece : int
        Tokens that pass through the model at a time.

    Returns
    -------
    best : ndarray of int64, shape (size, length)
        The likeliest token at each scored position, -1 elsewhere and where no logit is finite.
    surprise : ndarray of float64, shape (size, length)
        Minus the logarithm of the label's probability, in nats; 0 where nothing is scored.
    """
    labels = examples.labels
    size, length = labels.shape
    best = np.full((size, length), -1, dtype=np.int64)
    surprise = np.zeros((size, length))
    # A label at t is predicted from position t - 1; text after the last one changes nothing.
    wanted = (labels[:, 1:] != IGNORED).any(axis=0)
    last = int(np.flatnonzero(wanted)[-1]) + 1 if wanted.any() else 0
    ids = torch.from_numpy(examples.tokens[:, :last]).to(model.device)
    for start, states in _states(model, ids, piece):
        places = start + np.flatnonzero(wanted[start : start + states.shape[1]])
        for part in _parts(places, size, head.vocabulary):
            logits = head(states[:, torch.from_numpy(part - start).to(states.device)])
            target = torch.from_numpy(labels[:, part + 1]).to(logits.device)
            scored = target != IGNORED
            chosen = logits.gather(-1, target.clamp(min=0)[..., None])[..., 0]
            nats = (logits.logsumexp(-1) - chosen).masked_fill(~scored, 0.0)
            # Predictions that are no numbers are nobody's choice.
            top = logits.argmax(-1).masked_fill(~scored | ~nats.isfinite(), -1)
            best[:, part + 1] = top.cpu().numpy()
            surprise[:, part + 1] = nats.double().cpu().numpy()
    return best, surprise


def _states(model: LoadedModel, ids: torch.Tensor, piece: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Hidden states (size, tokens, width) of each piece, with the position of its first token."""
    length = ids.shape[1]
    if length == 0:
        return
    if piece >= length:
        yield 0, model.backbone(input_ids=ids, use_cache=False).last_hidden_state
        return
    held: dict[str, Any] = {}
    for start in range(0, length, piece):
        found = model.backbone(input_ids=ids[:, start : start + piece], use_cache=True, **held)
        # transformers renamed it.
        name = next((key for key in ("cache", "past_key_values") if found.get(key) is not None), None)
        if name is None and start + piece < length:
            raise InputError("chunk", piece, "the model keeps no keys from one piece to the next: 0 is allowed")
        held = {} if name is None else {name: found[name]}
        yield start, found.last_hidden_state


def _parts(places: np.ndarray, size: int, vocabulary: int) -> Iterator[np.ndarray]:
    """Positions in groups whose logits take at most 128 MiB in float32."""
    most = max(1, (1 << 25) // (size * vocabulary))
    for start in range(0, len(places), most):
        yield places[start : start + most]


@dataclass(frozen=True)
class Head:
    """From a model's last states to logits: a linear map, and what some models do to its results.

    Attributes
    ----------
    linear : Module
        Its output embeddings.
    factor : float
        Of the results (Granite, Cohere).
    cap : float or None
        c in c tanh(x / c) (Gemma).
    """

    linear: Any
    factor: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, model: LoadedModel) -> Head:
        """The head of a model.

        Raises
        ------
        InputError
            If it has none, or its logits come about in another way.
        """
        linear = model.model.get_output_embeddings()
        if not model.causal or getattr(linear, "weight", None) is None:
            raise InputError("model", model.name, "a causal language model with its head is needed")
        config = model.model.config.get_text_config()
        factor = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1
        )
        return cls(linear, factor, getattr(config, "final_logit_softcapping", None))

    @property
    def vocabulary(self) -> int:
        """Number of logits."""
        return int(self.linear.weight.shape[0])

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Logits in float32 at least: in bfloat16 the two likeliest tokens are often equal."""
        wide = torch.promote_types(states.dtype, torch.float32)
        bias = getattr(self.linear, "bias", None)
        bias = None if bias is None else bias.to(wide)
        found = torch.nn.functional.linear(states.to(wide), self.linear.weight.to(wide), bias) * self.factor
        return found if self.cap is None else self.cap * torch.tanh(found / self.cap)

    @torch.inference_mode()
    def check(self, model: LoadedModel, ids: torch.Tensor) -> None:
        """InputError unless these are the model's logits, as far as the rounding of its dtype lets one tell."""
        own = model.model(input_ids=ids, use_cache=False).logits
        found = self(model.backbone(input_ids=ids, use_cache=False).last_hidden_state)
        scale = own.float().abs().max()
        if not torch.isfinite(scale):
            return  # told with the answers
        if (found.float() - own.float()).abs().max() > 8 * torch.finfo(own.dtype).eps * scale * ids.shape[1] ** 0.5:
            raise InputError("model", model.name, "its logits are no linear map of its last states, as they should be")


def trained_parameters(folder: Path, name: str) -> dict[str, Any]:
    """Parameters of the task that a model was trained on, if ``train.json`` in its folder names that task.

    Of several tasks of that name, those in which all agree.
    """
    try:
        source = read_json(folder / "train.json")["source"]
        parts = [dict(part["parameters"]) for part in source.get("parts", [source]) if part["task"] == name]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    first, *others = parts or [{}]
    return {key: value for key, value in first.items() if all(key in o and o[key] == value for o in others)}
