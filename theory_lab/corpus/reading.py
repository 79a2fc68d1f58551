"""Opening a corpus and dealing out its tokens.

::

    CORPUS/manifest.json             name, sources with licenses and checksums, counts, split, tokenizer, versions
    CORPUS/tokenizer.json            byte-level BPE of the tokenizers package; <bos> 0, <eos> 1, <pad> 2
    CORPUS/train.bin                 tokens as little-endian uint16, documents one after the other, each ended by <eos>
    CORPUS/train.documents.npy       where each document begins, int64
    CORPUS/validation.bin, validation.documents.npy
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from theory_lab.errors import InputError
from theory_lab.outside import expanded, read_json, read_npy
from theory_lab.streams import cell_digest, validate_seed
from theory_lab.tasks.source import BOS, I64, TRAINING, below, check_batch, draw_words

FORMAT = 1
SPLITS = ("train", "validation")
TOKEN = np.dtype("<u2")
#: Documents of a split, at most.
_MOST_DOCUMENTS = 1 << 32


@dataclass(frozen=True)
class Corpus:
    """A corpus on a disk.

    Attributes
    ----------
    path : Path
        Its folder.
    manifest : dict
        The content of ``manifest.json``.
    """

    path: Path
    manifest: dict[str, Any] = field(repr=False)

    @classmethod
    def open(cls, path: str | Path) -> Corpus:
        """Open a folder made by ``theory-lab corpus build``.

        Raises
        ------
        InputError
            If it is none, was made by another version, or a file is missing or has another size than it should.
        """
        if not isinstance(path, (str, Path)) or not str(path).strip():
            raise InputError("corpus", path, "a folder made by theory-lab corpus build is allowed")
        folder = expanded(path)
        try:
            manifest = read_json(folder / "manifest.json")
            form, name = manifest["format"], manifest["name"]
            if form == FORMAT and not _is_whole(manifest):
                raise ValueError
            sizes = {split: manifest["splits"][split]["tokens"] for split in SPLITS}
        except FileNotFoundError:
            raise InputError(
                "corpus", str(path), "a folder made by theory-lab corpus build is allowed; it has no manifest.json"
            ) from None
        except (OSError, ValueError, LookupError, TypeError):
            raise InputError("corpus", str(path), "its manifest.json is damaged: build it again") from None
        if form != FORMAT:
            raise InputError("corpus", str(path), f"'{name}' has format {form}, this version reads {FORMAT}")
        for split, tokens in sizes.items():
            file = folder / f"{split}.bin"
            if not file.is_file() or file.stat().st_size != tokens * TOKEN.itemsize:
                raise InputError("corpus", str(path), f"{file.name} is missing or incomplete: build it again")
        return cls(folder.resolve(), manifest)

    @property
    def name(self) -> str:
        """As it was called when it was built."""
        return str(self.manifest["name"])

    @property
    def vocab_size(self) -> int:
        """Of its tokenizer."""
        return int(self.manifest["tokenizer"]["vocab_size"])

    @property
    def tokenizer_file(self) -> Path:
        """Its ``tokenizer.json``."""
        return self.path / "tokenizer.json"

    def tokenizer(self) -> Any:
        """Its tokenizer, a ``tokenizers.Tokenizer``."""
        from theory_lab.corpus.tokenizer import open_tokenizer

        return open_tokenizer(self.tokenizer_file)

    def tokens(self, split: str) -> npt.NDArray[np.uint16]:
        """All tokens of a split, mapped from the disk, shape (tokens,)."""
        self._check_split(split)
        return np.memmap(self.path / f"{split}.bin", dtype=TOKEN, mode="r")

    def documents(self, split: str) -> I64:
        """Where the documents of a split begin, shape (documents,)."""
        self._check_split(split)
        try:
            return read_npy(self.path / f"{split}.documents.npy", _MOST_DOCUMENTS)
        except (OSError, ValueError) as error:
            raise InputError("corpus", str(self.path), f"{split}.documents.npy is damaged: build it again") from error

    def source(self, split: str = "train", seed: int = 0) -> CorpusSource:
        """Random crops of a split, as a :class:`~theory_lab.tasks.source.Source`."""
        return CorpusSource(self, split, seed)

    def windows(self, split: str, length: int, count: int | None = None) -> I64:
        """Windows of a split one after the other, without overlap: the same for every model.

        Parameters
        ----------
        split : {'train', 'validation'}
        length : int
            Tokens a window: a ``<bos>`` and ``length`` - 1 of the text.
        count : int, optional
            The first so many, evenly spread over the split; all if None.

        Returns
        -------
        ndarray of int64, shape (windows, length)
        """
        check_batch(0, 1, length)
        text = self.tokens(split)
        most = len(text) // (length - 1)
        if most < 1 or (count is not None and not 1 <= count <= most):
            raise InputError("length", length, f"the {split} split of '{self.name}' has {most} windows of that length")
        chosen = np.arange(most) if count is None else np.arange(count) * most // count
        return self.checked(_crops(text, chosen * (length - 1), length))

    def checked(self, tokens: I64) -> I64:
        """The same tokens; InputError if one is none of the vocabulary: it would be read from beyond a table."""
        if tokens.size and int(tokens.max()) >= self.vocab_size:
            raise InputError(
                "corpus",
                str(self.path),
                f"it holds token {int(tokens.max())}, and its vocabulary has {self.vocab_size:,}: build it again",
            )
        return tokens

    def _check_split(self, split: str) -> None:
        if split not in SPLITS:
            raise InputError("split", split, f"{' or '.join(SPLITS)} is allowed")


def _is_whole(manifest: Any) -> bool:
    """Whether a manifest holds all that a corpus says of itself; KeyError or TypeError if it does not."""
    counts = [manifest["splits"][split][key] for split in manifest["splits"] for key in _COUNTS]
    counts += [source[key] for source in manifest["sources"] for key in ("documents", "kept_documents", "tokens")]
    counts.append(manifest["tokenizer"]["vocab_size"])
    words = [source[key] for source in manifest["sources"] for key in ("name", "version", "license")]
    return (
        isinstance(manifest["name"], str)
        and isinstance(manifest["splits"], dict)
        and all(split in manifest["splits"] for split in SPLITS)
        and all(type(count) is int and 0 <= count < 1 << 53 for count in counts)
        and all(isinstance(word, str) for word in words)
    )


_COUNTS = ("documents", "tokens", "characters")


class CorpusSource:
    """Random crops of a corpus: a ``<bos>``, then ``length`` - 1 consecutive tokens from anywhere in the split.

    Parameters
    ----------
    corpus : Corpus
    split : {'train', 'validation'}
    seed : int
    """

    def __init__(self, corpus: Corpus, split: str = "train", seed: int = 0) -> None:
        self.corpus = corpus
        self.split = split
        self.seed = validate_seed(seed)
        self._tokens = corpus.tokens(split)
        self._sha256 = str(corpus.manifest["splits"][split].get("sha256", ""))

    @property
    def vocab_size(self) -> int:
        """Of the corpus' tokenizer."""
        return self.corpus.vocab_size

    def describe(self) -> dict[str, Any]:
        """The corpus by its name and its tokens' checksum, the split and the seed."""
        return {"corpus": self.corpus.name, "split": self.split, "sha256": self._sha256, "seed": self.seed}

    def batch(self, step: int, size: int, length: int) -> tuple[I64, I64]:
        """Tokens and labels of one step, shape (size, length) each; see :class:`~theory_lab.tasks.source.Source`.

        Raises
        ------
        InputError
            If the split is smaller than one batch.
        """
        check_batch(step, size, length)
        if len(self._tokens) < size * (length - 1):
            raise InputError(
                "corpus",
                self.corpus.name,
                f"its {self.split} split has {len(self._tokens):,} tokens, fewer than a batch of {size:,} sequences of "
                f"{length:,}: a smaller batch, or more text, is needed",
            )
        places = len(self._tokens) - (length - 1) + 1
        digest = cell_digest({"corpus": self._sha256, "split": self.split, "length": int(length)}, self.seed)
        starts = below(draw_words(digest, int(step), int(size), 1, TRAINING)[:, 0], places)
        tokens = self.corpus.checked(_crops(self._tokens, starts, int(length)))
        return tokens, tokens.copy()


def _crops(text: npt.NDArray[np.uint16], starts: I64, length: int) -> I64:
    tokens = np.empty((len(starts), length), dtype=np.int64)
    tokens[:, 0] = BOS
    for row, start in enumerate(starts):
        tokens[row, 1:] = text[start : start + length - 1]
    return tokens
