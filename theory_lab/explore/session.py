"""What the explorer answers, whoever asks: captured attention, the panes that show it, and the cost of a picture.

A question is a kind and a few words (``map``, ``pane=p0 layer=3 ...``); an answer is a header and an array of float32.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from theory_lab.errors import InputError
from theory_lab.probes.capturing import capture
from theory_lab.probes.map_arguments import Span
from theory_lab.probes.maps import Captured
from theory_lab.probes.whatif import Mechanism, parse_mechanism

if TYPE_CHECKING:
    from theory_lab.models import LoadedModel
    from theory_lab.probes.texts import Text

#: Most pixels a side, and a thumbnail's.
MOST_PIXELS, MOST_THUMBNAIL = 1024, 128
#: Pairs of tokens read for a picture that should come at once, and for one worth waiting a moment for. The first is
#: about 0.15 s on two cores; only the largest score of a pixel becomes a weight there (cheap), or every score (dear).
CHEAP_PAIRS, DEAR_PAIRS = 4.0e7, 1.5e7
SOON = 20.0

Picture = tuple[dict[str, Any], NDArray[np.float32]]


@dataclass(frozen=True)
class Pane:
    """One map beside others: a model, a mechanism, and one of its views or the whole."""

    id: str
    model: int
    mechanism: Mechanism
    view: int | None
    label: str
    group: str
    signed: bool = False

    @property
    def diverging(self) -> bool:
        """Whether weights have signs."""
        return self.signed or (self.mechanism.name == "tda" and self.view is None)

    def about(self) -> dict[str, Any]:
        """What the page needs to know."""
        return {
            "id": self.id,
            "model": self.model,
            "label": self.label,
            "group": self.group,
            "diverging": self.diverging,
        }


class Session:
    """Captured attention of one or two models, and the panes that show it.

    Parameters
    ----------
    captures : sequence of Captured
        On the same text; the first one's tokens are the axes of all.
    mechanisms : sequence of str or Mechanism
        Other mechanisms' weights to show beside the model's own, such as "tra".
    layer, head : int, optional
        What to open first; the first captured ones by default.

    Raises
    ------
    InputError
        For more models or panes than can be shown, an unknown mechanism, or no such head.
    """

    def __init__(
        self,
        captures: Sequence[Captured],
        mechanisms: Iterable[str | Mechanism] = (),
        layer: int | None = None,
        head: int = 0,
    ) -> None:
        if not 1 <= len(captures) <= 2:
            raise InputError("models", len(captures), "one or two are allowed")
        self.captures = list(captures)
        self.layer = self.captures[0].layers[0] if layer is None else layer
        self.head = head
        chosen = [one if isinstance(one, Mechanism) else parse_mechanism(one) for one in mechanisms]
        self.panes = {pane.id: pane for pane in self._make_panes([one for one in chosen if not one.own])}
        # One picture at a time: torch uses all cores for each.
        self._lock = threading.Lock()
        self._answers: dict[str, Callable[[Mapping[str, str]], Picture]] = {
            "meta": self._meta, "map": self._map, "pair": self._pair, "thumbnails": self._thumbnails,
        }  # fmt: skip
        heads = self.captures[0].heads(self.layer)
        if not 0 <= head < heads:
            raise InputError("head", head, f"heads 0 to {heads - 1} of layer {self.layer} are allowed")
        for pane in self.panes.values():
            # A mechanism that the model has no second view for is refused now, not by the first picture.
            model = self.captures[pane.model]
            model.map(model.layers[0], 0, (0, 1), as_=pane.mechanism, view=pane.view)

    def _make_panes(self, mechanisms: list[Mechanism]) -> list[Pane]:
        made: list[tuple[Any, ...]] = []
        names = [captured.model for captured in self.captures]
        if len(set(names)) < len(names):
            names = [f"{name} ({place})" for name, place in zip(names, ("first", "second"), strict=True)]
        for model, name in enumerate(names):
            of = f"{name}: " if len(names) > 1 else ""
            own = name if len(names) > 1 else "the model's own"
            captured = self.captures[model]
            if captured.two_views(captured.layers[0]):
                made += [(model, Mechanism(), view, f"{of}own view {view}", "own") for view in (1, 2)]
                own = f"{of}own difference"
            made.append((model, Mechanism(), None, own, "own", captured.two_views(captured.layers[0])))
            for one in mechanisms:
                if one.name == "tda":
                    made += [(model, one, view, f"{of}view {view}", one.label) for view in (1, 2)]
                    made.append((model, one, None, f"{of}difference, {one.label}", one.label))
                else:
                    made.append((model, one, None, f"{of}{one.label}", one.label))
        if len(made) > 8:
            raise InputError("as", f"{len(made)} maps side by side", "at most 8: fewer mechanisms or one model")
        return [Pane(f"p{index}", *rest) for index, rest in enumerate(made)]

    def answer(self, kind: str, words: Mapping[str, str]) -> Picture:
        """Answer a question.

        Returns
        -------
        header : dict
            What the numbers are, fit for JSON.
        numbers : array of float32

        Raises
        ------
        InputError
            An unknown kind, a word that is missing or not allowed.
        """
        if kind not in self._answers:
            raise InputError("question", kind, f"one of {', '.join(self._answers)} is allowed")
        with self._lock:
            return self._answers[kind](words)

    def _meta(self, words: Mapping[str, str]) -> Picture:
        first = self.captures[0]
        models = []
        for captured in self.captures:
            layers = []
            for layer in captured.layers:
                queries, keys = captured.size(layer)
                layers.append(
                    {"layer": layer, "heads": captured.heads(layer), "rows": queries, "columns": keys,
                     "sight": _sight(captured.calls[layer])}
                )  # fmt: skip
            models.append(
                {
                    "name": captured.model,
                    "words": captured.tokens,
                    "layers": layers,
                    "aligned": captured.ids == first.ids and captured.tokens == first.tokens,
                }
            )
        panes = [pane.about() for pane in self.panes.values()]
        return {"models": models, "panes": panes, "layer": self.layer, "head": self.head}, _EMPTY

    def _map(self, words: Mapping[str, str]) -> Picture:
        pane, captured = self._pane(words)
        layer, head = _whole(words, "layer"), _whole(words, "head")
        rows, columns = captured.window(layer, (_span(words, "rows"), _span(words, "columns")))
        resolution = _whole(words, "resolution", 1, MOST_PIXELS)
        quality = _word(words, "quality", ("quick", "fine", "all"))
        reduce = _word(words, "reduce", ("max", "sum"))
        samples, soon = self._samples(pane, captured, layer, rows, columns, resolution, reduce, quality)
        found = captured.map(
            layer, head, (rows, columns), resolution=resolution, reduce=reduce, as_=pane.mechanism, view=pane.view,
            row_samples=samples,
        )  # fmt: skip
        exact = found.row_samples is None
        header = {
            "rows": rows,
            "columns": columns,
            "shape": found.image.shape,
            "reduce": reduce,
            "exact": exact,
            "soon": soon,
            "read": found.row_samples,
            "of": int(np.diff(found.row_edges).max()),
        }
        return header, found.image

    def _samples(
        self, pane: Pane, captured: Captured, layer: int, rows: Span, columns: Span, resolution: int, reduce: str,
        quality: str,
    ) -> tuple[int | None, bool]:  # fmt: skip
        """How many queries a pixel to read (None: all), and whether all would soon be read."""
        if quality == "all":
            return None, True
        cheap = reduce == "max" and pane.mechanism.name != "eta" and not pane.diverging
        budget = CHEAP_PAIRS if cheap else DEAR_PAIRS
        pairs = _pairs(captured, layer, rows, columns) * (2 if pane.diverging else 1)
        soon = pairs <= SOON * budget
        if pairs <= budget or (quality == "fine" and soon):
            return None, soon
        height = rows[1] - rows[0]
        each = -(-height // min(resolution, height))
        # Rows that are read cost their window, and their whole length once, for the normalizer.
        return max(1, int(each * budget / pairs)), soon

    def _pair(self, words: Mapping[str, str]) -> Picture:
        """The strongest pair of a small window, and every pane's value there."""
        pane, captured = self._pane(words)
        layer, head = _whole(words, "layer"), _whole(words, "head")
        rows, columns = captured.window(layer, (_span(words, "rows"), _span(words, "columns")))
        height, width = rows[1] - rows[0], columns[1] - columns[0]
        if height * width > MOST_PIXELS**2:
            raise InputError("rows", f"{height} x {width} pairs", f"at most {MOST_PIXELS**2:,} pairs are searched")
        found = captured.map(
            layer, head, (rows, columns), resolution=(height, width), as_=pane.mechanism, view=pane.view
        )
        at = int(np.abs(found.image).argmax())
        row, column = rows[0] + at // width, columns[0] + at % width
        values = {}
        for other in self.panes.values():
            if other.model == pane.model:
                one = captured.map(
                    layer, head, ((row, row + 1), (column, column + 1)), as_=other.mechanism, view=other.view
                )
                values[other.id] = float(one.image[0, 0])
        return {"row": row, "column": column, "value": values[pane.id], "values": values}, _EMPTY

    def _thumbnails(self, words: Mapping[str, str]) -> Picture:
        pane, captured = self._pane(words)
        layer, size = _whole(words, "layer"), _whole(words, "size", 1, MOST_THUMBNAIL)
        queries = captured.size(layer)[0]
        # Two queries a pixel show where a head looks; all of them would take a minute over all heads of a long text.
        samples = None if queries <= 4 * size else 2
        found = captured.thumbnails(layer, size, as_=pane.mechanism, view=pane.view, row_samples=samples)
        return {"layer": layer, "size": found.shape[1], "heads": found.shape[0], "read": samples}, found

    def _pane(self, words: Mapping[str, str]) -> tuple[Pane, Captured]:
        pane = self.panes[_word(words, "pane", tuple(self.panes))]
        return pane, self.captures[pane.model]


_EMPTY = np.zeros(0, dtype=np.float32)


def open_session(
    model: str | Path | LoadedModel | Captured,
    text: str | Text | None = None,
    *,
    as_: str | Mechanism | Iterable[str | Mechanism] = (),
    compare: str | Path | LoadedModel | Captured | None = None,
    layer: int | None = None,
    head: int = 0,
    **loading: Any,
) -> Session:
    """Run the models over the text and make a session of what they attend to.

    Parameters
    ----------
    model, compare : str, path, LoadedModel or Captured
        One model, or two to look at side by side.
    text : str or Text
        The words themselves; None if everything is captured already.
    as_ : str, Mechanism or several of them
        Other mechanisms to show beside the model's own weights.
    layer, head : int, optional
        What to open first.
    **loading
        As for :func:`theory_lab.probes.maps.capture`.

    Raises
    ------
    InputError
        As for ``capture`` and :class:`Session`.
    """
    mechanisms = [as_] if isinstance(as_, (str, Mechanism)) else list(as_)
    # Before minutes go into a forward pass.
    mechanisms = [parse_mechanism(one) if isinstance(one, str) else one for one in mechanisms]
    captures: list[Captured] = []
    for given in (model, compare):
        if isinstance(given, Captured):
            captures.append(given)
        elif given is not None and text is None:
            raise InputError("text", "None", "the words themselves")
        elif given is not None and text is not None:
            captures.append(capture(given, text, **loading))
    return Session(captures, mechanisms, layer, head)


def _sight(call: Any) -> dict[str, Any]:
    """What the page shades: which keys no query of a place sees; nothing where that is not so simple."""
    offset = call.query_offset
    simple = call.mask is None and isinstance(offset, int)
    return {
        "causal": bool(simple and call.causal),
        "offset": offset if simple else 0,
        "span": call.window if simple else None,
    }


def _pairs(captured: Captured, layer: int, rows: Span, columns: Span) -> float:
    """Pairs of the window that are seen, about: the causal triangle and the padding are left out."""
    call = captured.call(layer)
    height, width = rows[1] - rows[0], columns[1] - columns[0]
    if call.mask is not None or not call.causal or not isinstance(call.query_offset, int):
        return float(height) * width
    # Rows see columns up to their own place: a line from the first row's count to the last one's.
    place = np.linspace(rows[0], rows[1], 64) + call.query_offset
    return float(np.clip(place - columns[0], 0, width).mean() * height)


def _text_of(words: Mapping[str, str], name: str) -> str:
    if name not in words:
        raise InputError(name, "missing", "the question needs it")
    return words[name]


def _word(words: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    text = _text_of(words, name)
    if text not in allowed:
        raise InputError(name, text, f"{', '.join(allowed)} is allowed")
    return text


def _whole(words: Mapping[str, str], name: str, low: int = 0, high: int = 1 << 31) -> int:
    text = _text_of(words, name)
    if not (text.isascii() and text.isdigit() and len(text) < 12 and low <= int(text) <= high):
        raise InputError(name, text, f"a whole number from {low} to {high} is allowed")
    return int(text)


def _span(words: Mapping[str, str], name: str) -> Span:
    parts = _text_of(words, name).split(",")
    if len(parts) != 2:
        raise InputError(name, words[name], "two whole numbers, as in 0,512, are allowed")
    first, last = (_whole({name: part}, name) for part in parts)
    return first, last
