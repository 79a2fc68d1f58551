"""Maps of a trained model's attention: any window of any head's T x S map as an image, without the map.

One forward pass captures the queries and keys of the layers; every image is then computed from those, so that a map of
100,000 tokens can be zoomed into. Shapes: T queries, S keys, H query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from theory_lab.errors import InputError
from theory_lab.probes.map_arguments import Span, checked_resolution, checked_span, edges, one_head, one_of
from theory_lab.probes.whatif import Mechanism, parse_mechanism

if TYPE_CHECKING:
    import torch

    from theory_lab.models import LoadedModel
    from theory_lab.probes.calls import AttentionCall
    from theory_lab.probes.texts import Text

REDUCTIONS = ("max", "sum")


@dataclass(frozen=True)
class AttentionMap:
    """An image of a window of one head's attention map.

    Attributes
    ----------
    image : array (R, C) of float32
        Pixel (r, c) reduces the weights of the queries ``row_edges[r]`` up to ``row_edges[r + 1]`` on the keys
        ``column_edges[c]`` up to ``column_edges[c + 1]``.
    layer, head : int
    reduce : str
        ``max``: the weight of largest magnitude, with its sign; ``sum``.
    mechanism : str
        ``model`` for the model's own weights, or another mechanism's label.
    view : int or None
        1 or 2 for one view of a mechanism with two, None for the whole.
    rows, columns : (int, int)
        The window.
    row_edges, column_edges : array of int64
        Where pixels begin and end, (R + 1,) and (C + 1,).
    row_samples : int or None
        How many queries of a pixel were read; None says all: then the image is exact.
    tokens : tuple of str
        Of the whole text.
    """

    image: NDArray[np.float32]
    layer: int
    head: int
    reduce: str
    mechanism: str
    view: int | None
    rows: Span
    columns: Span
    row_edges: NDArray[np.int64]
    column_edges: NDArray[np.int64]
    row_samples: int | None
    tokens: tuple[str, ...] = field(repr=False)

    @property
    def row_profile(self) -> NDArray[np.float32]:
        """The same reduction over all of the window's keys, for every pixel row, (R,)."""
        return self._profile(1)

    @property
    def column_profile(self) -> NDArray[np.float32]:
        """The same reduction over all of the window's queries, for every pixel column, (C,)."""
        return self._profile(0)

    def _profile(self, axis: int) -> NDArray[np.float32]:
        if self.reduce == "sum":
            return self.image.sum(axis, dtype=np.float64).astype(np.float32)
        high, low = self.image.max(axis), self.image.min(axis)
        return np.where(high >= -low, high, low)


@dataclass(frozen=True)
class SparseMap:
    """Rows of one head's map with their non-zero weights alone.

    Attributes
    ----------
    indices : array (entries, 2) of int64
        Query and key of each weight, in the order of the rows.
    values : array (entries,) of float32
    pointers : array (rows + 1,) of int64
        Entries ``pointers[i]`` up to ``pointers[i + 1]`` belong to query ``rows[0] + i``.
    rows : (int, int)
    keys : int
        S.
    """

    indices: NDArray[np.int64]
    values: NDArray[np.float32]
    pointers: NDArray[np.int64]
    rows: Span
    keys: int


class Captured:
    """Queries and keys of a model on a text; made by :func:`theory_lab.probes.capture`.

    They are kept as the model computed them: for smollm2-135m and 8192 tokens 755 MB in float32 and half of it in
    bfloat16. Loading the model with ``dtype="bfloat16"``, or capturing fewer layers, needs less.

    Attributes
    ----------
    model : str
        Its name.
    tokens : tuple of str
        The text's tokens, as text.
    ids : tuple of int
        The same as numbers.
    calls : dict of int to AttentionCall
        What each layer was called with, without its values.
    unseen : dict of int to str
        Layers that cannot be watched, with the reason.
    """

    def __init__(
        self,
        model: str,
        tokens: tuple[str, ...],
        ids: tuple[int, ...],
        calls: dict[int, AttentionCall],
        unseen: dict[int, str] | None = None,
    ) -> None:
        self.model, self.tokens, self.ids, self.calls = model, tokens, ids, calls
        self.unseen = unseen or {}
        self._normalizers: dict[tuple[int, str, int | None], torch.Tensor] = {}
        self._inputs: dict[tuple[int, str], tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = {}

    @classmethod
    def from_tensors(
        cls,
        name: str,
        tokens: Sequence[str],
        layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
        *,
        scale: float | None = None,
        causal: bool = True,
        views: Sequence[tuple[tuple[torch.Tensor, torch.Tensor], ...]] | None = None,
    ) -> Captured:
        """Queries and keys of one's own, without a model.

        Parameters
        ----------
        name : str
            What pictures are headed with.
        tokens : sequence of str
            T of them.
        layers : sequence of (q, k)
            (1, H, T, D) and (1, G, T, D) of each layer.
        scale : float, optional
            Logits are ``scale * <q, k>``; 1 / sqrt(D) by default.
        causal : bool
            Whether queries see no later keys.
        views : sequence of tuples of (q, k), optional
            Further views of each layer.

        Raises
        ------
        InputError
            If shapes do not fit the tokens.
        """
        import torch

        from theory_lab.probes.calls import AttentionCall, Visibility

        calls = {}
        for layer, (q, k) in enumerate(layers):
            for which, x in (("q", q), ("k", k)):
                if x.ndim != 4 or x.shape[0] != 1 or x.shape[2] != len(tokens) or not x.is_floating_point():
                    raise InputError(
                        f"{which} of layer {layer}",
                        f"{x.dtype} of shape {tuple(x.shape)}",
                        f"floating (1, heads, {len(tokens)}, D) is allowed, for {len(tokens)} tokens",
                    )
            calls[layer] = AttentionCall(
                layer, f"layers.{layer}", torch.nn.Identity(), q.detach(), k.detach(), k[..., :0].detach(),
                q.shape[3] ** -0.5 if scale is None else scale, None, None, Visibility(causal),
                () if views is None else tuple(views[layer]),
            )  # fmt: skip
        known = {word: number for number, word in enumerate(dict.fromkeys(tokens))}
        return cls(name, tuple(tokens), tuple(known[word] for word in tokens), calls)

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that were captured."""
        return tuple(sorted(self.calls))

    def heads(self, layer: int) -> int:
        """Query heads of a layer."""
        return int(self.call(layer).q.shape[1])

    def size(self, layer: int) -> tuple[int, int]:
        """T and S of a layer's maps."""
        call = self.call(layer)
        return int(call.q.shape[2]), int(call.k.shape[2])

    def map(
        self,
        layer: int,
        head: int,
        window: Span | tuple[Span, Span] | None = None,
        *,
        resolution: int | tuple[int, int] = 512,
        reduce: str = "max",
        as_: str | Mechanism | None = None,
        view: int | None = None,
        row_samples: int | None = None,
    ) -> AttentionMap:
        """An image of a window; see :func:`attention_map`."""
        rows, columns = self.window(layer, window)
        if reduce not in REDUCTIONS:
            raise InputError("reduce", reduce, f"{' or '.join(REDUCTIONS)} is allowed")
        down, across = checked_resolution(resolution)
        if row_samples is not None and row_samples < 1:
            raise InputError("row_samples", row_samples, "a whole number of at least 1 is allowed")
        mechanism = as_ if isinstance(as_, Mechanism) else parse_mechanism(as_)
        if self._pairwise(layer, mechanism):
            from theory_lab.probes.pairwise import image_of

            self._check_head(layer, head, view, mechanism)
            image = image_of(self.call(layer), head, view, rows, columns, (down, across), reduce)
            row_samples = None
        else:
            from theory_kernels import pooled_map

            tensors, arguments, normalizers, _ = self._head(layer, head, mechanism, view)
            image = pooled_map(
                *tensors, rows=rows, columns=columns, resolution=(down, across), reduce=reduce,
                row_samples=row_samples, normalizers=normalizers, **arguments,
            )[0, 0]  # fmt: skip
        row_edges, column_edges = edges(rows, image.shape[0]), edges(columns, image.shape[1])
        whole = row_samples is None or row_samples >= int(np.diff(row_edges).max())
        return AttentionMap(
            image.float().cpu().numpy(), layer, head, reduce, mechanism.label, view, rows, columns, row_edges,
            column_edges, None if whole else row_samples, self.tokens,
        )  # fmt: skip

    def thumbnails(
        self,
        layer: int,
        size: int = 48,
        *,
        as_: str | Mechanism | None = None,
        view: int | None = None,
        row_samples: int | None = 2,
    ) -> NDArray[np.float32]:
        """Small maxima images of a layer's heads, (H, size, size), from a few queries a pixel."""
        return np.stack(
            [
                self.map(layer, head, resolution=size, as_=as_, view=view, row_samples=row_samples).image
                for head in range(self.heads(layer))
            ]
        )

    def sparse_rows(
        self,
        layer: int,
        head: int,
        rows: Span | None = None,
        *,
        above: float = 0.0,
        as_: str | Mechanism | None = None,
        view: int | None = None,
    ) -> SparseMap:
        """Weights that are not zero; see :func:`sparse_rows`."""
        queries, keys = self.size(layer)
        rows = checked_span("rows", (0, queries) if rows is None else rows, queries)
        if not 0.0 <= above < float("inf"):
            raise InputError("above", above, "a number of at least 0 is allowed")
        mechanism = as_ if isinstance(as_, Mechanism) else parse_mechanism(as_)
        if self._pairwise(layer, mechanism):
            from theory_lab.probes.pairwise import entries_of

            self._check_head(layer, head, view, mechanism)
            return SparseMap(*entries_of(self.call(layer), head, view, rows, above), rows, keys)
        tensors, arguments, normalizers, _ = self._head(layer, head, mechanism, view)
        import theory_kernels

        found = theory_kernels.sparse_rows(*tensors, rows=rows, above=above, normalizers=normalizers, **arguments)
        pointers = found.pointers.cpu().numpy()
        queries_of = np.repeat(np.arange(*rows), np.diff(pointers))
        indices = np.stack([queries_of, found.columns.cpu().numpy()], 1)
        return SparseMap(indices, found.values.float().cpu().numpy(), pointers, rows, keys)

    def call(self, layer: int) -> AttentionCall:
        """What a layer was called with; InputError if it was not captured."""
        if layer not in self.calls:
            why = f" ({self.unseen[layer]})" if layer in self.unseen else ""
            raise InputError("layer", layer, f"layers {_listed(self.layers)} were captured{why}")
        return self.calls[layer]

    def window(self, layer: int, window: Any) -> tuple[Span, Span]:
        """Rows and columns of a window as people give it; InputError if it is not in the layer's map."""
        queries, keys = self.size(layer)
        if window is None:
            return (0, queries), (0, keys)
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise InputError("window", window, "(first, last) of both axes, or ((rows), (columns)), is allowed")
        rows, columns = window if isinstance(window[0], (tuple, list)) else (window, window)
        return checked_span("window rows", rows, queries), checked_span("window columns", columns, keys)

    def _head(
        self, layer: int, head: int, as_: str | Mechanism | None, view: int | None
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, Any], torch.Tensor, Mechanism]:
        """Operands, arguments and cached normalizers of one head."""
        mechanism = as_ if isinstance(as_, Mechanism) else parse_mechanism(as_)
        heads = self._check_head(layer, head, view, mechanism)
        tensors, arguments = self._layer_inputs(layer, mechanism)
        arguments = dict(arguments)
        if view is not None:
            # One view of TDA is TRA on that view's queries and keys.
            tensors = tensors[2 * view - 2 : 2 * view]
            arguments["weights"] = "tra"
            arguments.pop("lam", None)
        key = (layer, mechanism.label, view)
        if key not in self._normalizers:
            from theory_kernels import row_normalizers

            self._normalizers[key] = row_normalizers(*tensors, rows=(0, 0), **arguments)
        one = tuple(one_head(x, head, heads) for x in tensors)
        for name in ("sinks", "mask", "beta", "lam", "eta_threshold"):
            if name in arguments:
                arguments[name] = one_of(arguments[name], name, head)
        return one, arguments, self._normalizers[key][:, head : head + 1], mechanism

    def two_views(self, layer: int) -> bool:
        """Whether the layer's own weights are the difference of two views."""
        own = self.call(layer).own
        return own is not None and own.mechanism.views == 2

    def _check_head(self, layer: int, head: int, view: int | None, mechanism: Mechanism) -> int:
        """The layer's number of heads; InputError if it has no such head or view."""
        heads = self.heads(layer)
        if not 0 <= head < heads:
            raise InputError("head", head, f"heads 0 to {heads - 1} of layer {layer} are allowed")
        two = self.two_views(layer) if mechanism.own else mechanism.name == "tda"
        if view is not None and (not two or view not in (1, 2)):
            raise InputError("view", view, "1 or 2, of tda, is allowed, or of a model with two views")
        return heads

    def _pairwise(self, layer: int, mechanism: Mechanism) -> bool:
        """Whether the weights can only be had by the definition of the model's own mechanism."""
        call = self.call(layer)
        if not mechanism.own or call.own is None:
            return False
        from theory_lab.probes.own import streamed

        return streamed(call) is None

    def _layer_inputs(self, layer: int, mechanism: Mechanism) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        key = (layer, mechanism.label)
        found = self._inputs.get(key)
        if found is None:
            found = mechanism.inputs(self.call(layer))
            # A second view may be a copy as large as the queries: only the latest are kept.
            while len(self._inputs) >= 4:
                self._inputs.pop(next(iter(self._inputs)), None)
            self._inputs[key] = found
        return found


def attention_map(
    model: str | Path | LoadedModel | Captured,
    text: str | Text | None,
    layer: int,
    head: int,
    window: Span | tuple[Span, Span] | None = None,
    resolution: int | tuple[int, int] = 512,
    reduce: str = "max",
    *,
    as_: str | Mechanism | None = None,
    view: int | None = None,
    row_samples: int | None = None,
    **loading: Any,
) -> AttentionMap:
    """An image of any window of one head's attention map, at a fixed resolution.

    Parameters
    ----------
    model : str, path, LoadedModel or Captured
        A model, which is run over the text, or what :func:`theory_lab.probes.capture` made of one, which costs nothing
        again.
    text : str or Text
        The words themselves; None with a Captured.
    layer, head : int
        0-based.
    window : (int, int) or ((int, int), (int, int)), optional
        First token up to, not including, the last; of both axes alike, or of the queries (rows) and of the keys
        (columns). Default: everything.
    resolution : int or (int, int)
        Most pixels down and across; a smaller window has one pixel a pair.
    reduce : {"max", "sum"}
        What a pixel shows of its weights.
    as_ : str or Mechanism, optional
        Another mechanism's weights on the model's own queries and keys, such as "tra:beta=0.8".
    view : int, optional
        1 or 2: one view of ``as_="tda"``, or of a model with two, instead of the difference.
    row_samples : int, optional
        Read at most so many queries a pixel: quicker for long texts, and a lower bound of a maximum.
    **loading
        As for :func:`theory_lab.probes.capture`.

    Returns
    -------
    AttentionMap

    Raises
    ------
    InputError
        As for :func:`theory_lab.probes.capture`; no such layer or head, a window outside the map, an unknown reduction
        or mechanism.
    """
    if isinstance(model, Captured):
        captured = _given(model, text, loading)
    else:
        from theory_lab.probes.capturing import capture

        captured = capture(model, _text(text), **{"layers": [layer], **loading})
    return captured.map(
        layer, head, window, resolution=resolution, reduce=reduce, as_=as_, view=view, row_samples=row_samples
    )


def sparse_rows(
    model: str | Path | LoadedModel | Captured,
    text: str | Text | None,
    layer: int,
    head: int,
    rows: Span | None = None,
    *,
    above: float = 0.0,
    as_: str | Mechanism | None = None,
    view: int | None = None,
    **loading: Any,
) -> SparseMap:
    """Weights of one head that are not exactly zero, or larger in magnitude than ``above``, as (query, key) and value.

    Parameters
    ----------
    model, text, layer, head, as_, view, **loading
        As for :func:`attention_map`.
    rows : (int, int), optional
        Queries, first up to, not including, the last.
    above : float
        Softmax has no zeros: a threshold keeps its large weights.

    Returns
    -------
    SparseMap

    Raises
    ------
    InputError
        As for :func:`attention_map`.
    """
    if isinstance(model, Captured):
        captured = _given(model, text, loading)
    else:
        from theory_lab.probes.capturing import capture

        captured = capture(model, _text(text), **{"layers": [layer], **loading})
    return captured.sparse_rows(layer, head, rows, above=above, as_=as_, view=view)


def _given(captured: Captured, text: Any, loading: dict[str, Any]) -> Captured:
    if text is not None or loading:
        what = "text" if text is not None else next(iter(loading))
        raise InputError(what, repr(text if text is not None else loading[what]), "nothing, with captured attention")
    return captured


def _text(text: str | Text | None) -> str | Text:
    if text is None:
        raise InputError("text", "None", "the words themselves")
    return text


def _listed(layers: tuple[int, ...]) -> str:
    from theory_lab.probes.watching import spans

    return spans(layers)
