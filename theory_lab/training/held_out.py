"""What a run trains on, and the held-out batches that its evaluations use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from theory_lab.errors import InputError
from theory_lab.tasks.source import IGNORED

if TYPE_CHECKING:
    import torch

    from theory_lab.tasks.source import I64, Source
    from theory_lab.training.settings import TrainSettings


class Batch(NamedTuple):
    """Tokens and labels, each int64 of shape (sequences, length)."""

    tokens: I64
    labels: I64


class Opened(NamedTuple):
    """A run's data.

    Attributes
    ----------
    source : Source
        Training batches.
    held_out : list of Batch
        The same for every mechanism and every seed of a corpus.
    tokenizer : Path or None
        File of the tokenizer whose tokens these are, if they are words.
    is_task : bool
        Whether accuracy means something.
    """

    source: Source
    held_out: list[Batch]
    tokenizer: Path | None
    is_task: bool


def open_data(settings: TrainSettings) -> Opened:
    """Open the corpus or task of a run.

    Raises
    ------
    InputError
        For an unknown task, a folder that is no corpus, and a corpus smaller than one batch.
    """
    return _corpus(settings) if settings.task is None else _task(settings)


def _corpus(settings: TrainSettings) -> Opened:
    from theory_lab.corpus import Corpus

    assert settings.corpus is not None
    corpus = Corpus.open(settings.corpus)
    size = len(corpus.tokens("train"))
    if size < settings.tokens_per_step:
        raise InputError(
            "corpus",
            settings.corpus,
            f"it has {size:,} tokens to train on; at least one batch of {settings.batch} x {settings.length} = "
            f"{settings.tokens_per_step:,} is needed",
        )
    each = min(settings.micro_batch, 32)
    # A window is <bos> and length - 1 tokens of the corpus.
    fit = len(corpus.tokens("validation")) // max(settings.length - 1, 1)
    count = min(settings.eval_batches * each, fit)
    if count < 1:
        raise InputError(
            "length", settings.length, f"the corpus has {len(corpus.tokens('validation')):,} tokens to validate on"
        )
    windows = corpus.windows("validation", settings.length, count)
    each = min(each, max(count // 16, 1))  # the standard error is taken over batches: some 16 of them at least
    batches = [Batch(part, part) for part in np.split(windows, range(each, count, each))]
    return Opened(corpus.source("train", settings.seed), batches, corpus.tokenizer_file, False)


def _task(settings: TrainSettings) -> Opened:
    from theory_lab.tasks import Task, open_source
    from theory_lab.training.starting import start_tokenizer

    assert settings.task is not None
    tokenizer = None if settings.start is None else start_tokenizer(settings.start)
    source = open_source(settings.task, settings.seed, tokenizer=tokenizer, corpus=settings.corpus)
    if not isinstance(source, Task):
        raise InputError("task", settings.task, "a task is allowed; --corpus takes a folder")
    source.check_length(settings.length)
    each = min(settings.batch, 64)
    drawn = [source.examples(i, each, settings.length) for i in range(settings.eval_batches)]
    return Opened(source, [Batch(e.tokens, e.labels) for e in drawn], source.tokenizer_file, True)


class Held(NamedTuple):
    """Mean loss of the held-out tokens (nats), its standard error (None of a single batch), and of tasks the share that
    is right."""

    loss: float
    error: float | None
    accuracy: float | None


def evaluate(model: Any, opened: Opened, settings: TrainSettings, device: torch.device, rank: int, world: int) -> Any:
    """Sums over this process's share of the held-out batches: a float64 tensor (batches, 3) of zeros elsewhere.

    Columns are the loss summed over scored tokens, their number, and the number of right ones.
    """
    import torch

    from theory_lab.training.stepping import autocast

    sums = torch.zeros(len(opened.held_out), 3, dtype=torch.float64, device=device)
    training = model.training
    model.eval()
    with torch.no_grad():
        for index in range(rank, len(opened.held_out), world):
            batch = opened.held_out[index]
            tokens, labels = (torch.from_numpy(part).to(device) for part in batch)
            with autocast(device, settings.dtype):
                out = model(input_ids=tokens, labels=labels, use_cache=False)
            scored = labels[:, 1:] != IGNORED
            count = scored.sum()
            sums[index, 0] = out.loss.double() * count
            sums[index, 1] = count
            if opened.is_task:
                right = (out.logits[:, :-1].argmax(-1) == labels[:, 1:]) & scored
                sums[index, 2] = right.sum()
    model.train(training)
    return sums


def summarize(sums: Any, is_task: bool) -> Held:
    """From sums over all processes. The error treats batches as the independent units, weighed by their tokens."""
    losses, counts, right = sums.cpu().numpy().T
    total = counts.sum()
    mean = float(losses.sum() / total)
    groups = len(counts)
    error = None
    if groups > 1:
        spread = ((losses - mean * counts) ** 2).sum() * groups / (groups - 1)
        error = float(np.sqrt(spread) / total)
    return Held(mean, error, float(right.sum() / total) if is_task else None)
