"""Scores of unrelated tokens in a trained model as a noise family.

``model:smollm2-135m`` pools every head; ``layer=`` and ``head=`` choose. Like a file of scores it is centered and
rescaled to the requested proxy, so it asks about noise of that *shape*; with ``raw`` the scores are used as they are.
The scores are computed once (that needs torch) and kept in the cache, in a file named after everything they depend on;
reading them needs NumPy alone.
"""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from theory_lab.errors import InputError
from theory_lab.noise.empirical import Empirical, read_scores
from theory_lab.streams import F64

_VERSION = 1
#: Scores kept of a selection of heads: enough for a tail probability of 1e-4.
_MOST = 200_000


@dataclass(frozen=True)
class ModelSpec:
    """What follows ``model:``.

    Attributes
    ----------
    model : str
        A known model, a folder, a ``.gguf`` file or a Hub id.
    layer, head : int or None
        None pools all.
    length : int
        Tokens of each text.
    texts : tuple of str
        Files, at least two; none for the shipped texts.
    raw : bool
        Whether the scores are used as they are.
    """

    model: str
    layer: int | None = None
    head: int | None = None
    length: int = 512
    texts: tuple[str, ...] = ()
    raw: bool = False

    @property
    def name(self) -> str:
        """Canonical text, which parses to an equal specification."""
        parts = [f"model:{self.model}"]
        parts += [] if self.layer is None else [f"layer={self.layer}"]
        parts += [] if self.head is None else [f"head={self.head}"]
        parts += [] if self.length == 512 else [f"length={self.length}"]
        parts += [f"text={text}" for text in self.texts]
        return ",".join([*parts, *(["raw"] if self.raw else [])])


def parse_model(text: str) -> ModelSpec:
    """Parse ``model:NAME[,layer=L][,head=H][,length=T][,text=FILE]...[,raw]``; InputError otherwise."""
    model, *options = (part.strip() for part in text.removeprefix("model:").split(","))
    allowed = "model:NAME with layer=, head=, length=, text=FILE (at least two) and raw is allowed"
    if not model:
        raise InputError("noise", text, allowed)
    numbers: dict[str, int] = {}
    texts: list[str] = []
    raw = False
    for option in options:
        key, equals, value = (part.strip() for part in option.partition("="))
        if option == "raw":
            raw = True
        elif key == "text" and equals and value:
            texts.append(value)
        elif key in ("layer", "head", "length") and value.isascii() and value.isdigit():
            numbers[key] = int(value)
        else:
            raise InputError("noise", text, f"'{option}' is not understood; {allowed}")
    if len(texts) == 1:
        raise InputError("noise", text, "unrelated tokens come from two texts: give another text=")
    return ModelSpec(model, raw=raw, texts=tuple(texts), **numbers)


class ModelScores(Empirical):
    """The empirical law of a model's scores of unrelated tokens."""

    def __init__(self, spec: ModelSpec) -> None:
        scores, head_dim = _scores(spec)
        self._take(scores, name=spec.name, raw=spec.raw)
        self.head_dim = head_dim
        which = "all layers" if spec.layer is None else f"layer {spec.layer}"
        which += ", all heads" if spec.head is None else f", head {spec.head}"
        self.summary = f"{scores.size} cosines of unrelated tokens in {spec.model}, {which}, d = {head_dim}"

    def check_head_dim(self, head_dim: int) -> None:
        """Raise InputError if scores as they are would be held against another dimension's threshold."""
        if self.raw and head_dim != self.head_dim:
            raise InputError("head_dim", head_dim, f"{self.name} has cosines of dimension {self.head_dim}")


def _scores(spec: ModelSpec) -> tuple[F64, int]:
    """The scores from the cache, or computed and put there, with the head dimension."""
    from theory_lab.models.cache import cache_dir
    from theory_lab.store import write_whole

    file = cache_dir() / "scores" / f"{_digest(spec)}.npy"
    if file.is_file():
        try:
            found = read_scores(file)
            return found[1:], int(found[0])
        except InputError:
            pass  # damaged: computed again
    scores, head_dim = _measure(spec)
    buffer = io.BytesIO()
    np.save(buffer, np.concatenate([[float(head_dim)], scores]), allow_pickle=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(str(file), buffer.getvalue())
    return scores, head_dim


def _digest(spec: ModelSpec) -> str:
    """Name of the cached file: over the model's files by size and date, the texts' contents, and the selection."""
    from theory_lab.models.loading import find_folder
    from theory_lab.probes.texts import read_text, shipped

    folder = find_folder(spec.model)
    files = sorted(
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in Path(folder).iterdir()
        if path.suffix in (".safetensors", ".json")
    )
    sources = [read_text(name) for name in spec.texts] or list(shipped())
    identity = [_VERSION, spec.model, files, [text.digest for text in sources], spec.layer, spec.head, spec.length]
    return hashlib.blake2b(json.dumps(identity).encode(), digest_size=16).hexdigest()


def _measure(spec: ModelSpec) -> tuple[F64, int]:
    try:
        import torch  # noqa: F401  # only whether it is there
    except ImportError:
        raise InputError("noise", spec.name, "it needs torch: pip install 'theory-lab[models]'") from None
    from theory_lab.probes.texts import read_text
    from theory_lab.probes.unrelated import unrelated_scores
    from theory_lab.progress import make_progress

    found = unrelated_scores(
        spec.model,
        [read_text(name) for name in spec.texts] or None,
        length=spec.length,
        layers=None if spec.layer is None else [spec.layer],
        heads=None if spec.head is None else [spec.head],
        progress=make_progress(False, "probing", "texts"),
    )
    scores = found.samples.astype(np.float64).reshape(-1)
    # Of many heads a part is kept, evenly: neighbors are draws of one head.
    step = -(-scores.size // _MOST)
    return scores[::step], found.head_dim
