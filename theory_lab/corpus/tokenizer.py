"""A corpus' own tokenizer: byte-level BPE of the tokenizers package.

Digits are tokens of their own, so that numbers are read and written place by place. A text gets ``<bos>`` in front;
``<eos>`` ends a document of a corpus.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from theory_lab.errors import InputError

SPECIALS = ("<bos>", "<eos>", "<pad>")
#: Special tokens and one for every byte.
LEAST_VOCABULARY = len(SPECIALS) + 256
MOST_VOCABULARY = 1 << 16


def check_vocabulary(size: object) -> int:
    """A size that a corpus' tokenizer can have; InputError otherwise."""
    if isinstance(size, bool) or not isinstance(size, int) or not LEAST_VOCABULARY <= size <= MOST_VOCABULARY:
        raise InputError("vocab", size, f"a whole number from {LEAST_VOCABULARY} to {MOST_VOCABULARY:,} is allowed")
    return size


def _package() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise InputError("corpus", "tokenizers is not installed", "pip install 'theory-lab[corpus]'") from None
    return tokenizers


def train_tokenizer(texts: Iterable[str], vocabulary: int, *, at_most: bool = False) -> Any:
    """Learn a tokenizer from texts.

    Parameters
    ----------
    texts : iterable of str
    vocabulary : int
        Its size.
    at_most : bool
        Whether fewer will do where the texts hold no more pieces.

    Raises
    ------
    InputError
        If the texts hold too few different pieces for that vocabulary.
    """
    tk = _package()
    tokenizer = tk.Tokenizer(tk.models.BPE())
    tokenizer.pre_tokenizer = tk.pre_tokenizers.Sequence(
        [tk.pre_tokenizers.Digits(individual_digits=True), tk.pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = tk.decoders.ByteLevel()
    trainer = tk.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(tk.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = tk.processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", 0)]
    )
    found = tokenizer.get_vocab_size()
    if found < vocabulary and not at_most:
        raise InputError("vocab", vocabulary, f"the text has pieces for {found:,} at most: ask for that or fewer")
    return tokenizer


def open_tokenizer(file: str | Path) -> Any:
    """Read a ``tokenizer.json``; InputError if it is none."""
    tk = _package()
    try:
        return tk.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise InputError("tokenizer", str(file), f"it cannot be read ({str(error).splitlines()[0]})") from error


def tokenizer_settings(longest: int = 1 << 20) -> bytes:
    """The ``tokenizer_config.json`` that lets transformers' AutoTokenizer open a ``tokenizer.json`` beside it."""
    bos, eos, pad = SPECIALS
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
    }
    return (json.dumps(settings, indent=1) + "\n").encode()
