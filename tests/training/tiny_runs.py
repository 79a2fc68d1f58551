"""What the tests of training share."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

#: Two layers of one head each.
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 64}


def make_corpus(folder: Path, size: int, vocabulary: int = 64) -> None:
    rng = np.random.default_rng(5)
    steps = rng.choice([1, 2, 7], size=size, p=[0.8, 0.15, 0.05])
    tokens = (4 + np.cumsum(steps) % (vocabulary - 4)).astype("<u2")
    sizes = {"train": size * 9 // 10, "validation": size - size * 9 // 10}
    for split, part in zip(sizes, np.split(tokens, [sizes["train"]]), strict=True):
        part.tofile(folder / f"{split}.bin")
        np.save(folder / f"{split}.documents.npy", np.zeros(1, dtype=np.int64))
    manifest = {
        "format": 1,
        "name": "counting",
        "splits": {split: {"documents": 1, "tokens": count, "characters": count} for split, count in sizes.items()},
        "sources": [],
        "tokenizer": {"vocab_size": vocabulary},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    write_tokenizer(folder / "tokenizer.json", vocabulary)


def write_tokenizer(path: Path, vocabulary: int) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {"<bos>": 0, "<eos>": 1, "<pad>": 2, **{f"w{i}": i for i in range(3, vocabulary)}}
    Tokenizer(WordLevel(words, unk_token="<pad>")).save(str(path))


def losses(folder: Path) -> list[tuple[str, str, str, str]]:
    """What a run computed, as text: equal text is equal bits."""
    from theory_lab.training.logs import COLUMNS, Table

    return [(r["step"], r["loss"], r["grad_norm"], r["val_loss"]) for r in Table(folder / "log.csv", COLUMNS).rows()]
