"""Watching a model's attention: every call's queries, keys and mask, while the model computes what it always does.

transformers lets a model's configuration name its attention function. For the time of a watch, that name is replaced by
one of ours, under which two functions are registered: an attention function that calls the model's own and shows its
arguments to an observer, and a mask function that calls its counterpart. The model's arithmetic is untouched.
"""

from __future__ import annotations

import inspect
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Self

import torch

from theory_lab.errors import InputError
from theory_lab.probes.calls import AttentionCall
from theory_lab.probes.own import of_module
from theory_lab.probes.selfcheck import fault
from theory_lab.probes.visibility import Indescribable, read_mask

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Observer = Callable[[AttentionCall], None]

_PREFIX = "theory_lab_watch_"
_lock = threading.RLock()
#: Watches of an attention module, by its identity; a watch keeps its model alive.
_watches: dict[int, list[Watch]] = {}
#: Configurations whose name is replaced: the object, and how many watches want it so.
_renamed: dict[int, tuple[Any, int]] = {}


#: Kinds of calls whose description was found to explain the output, by attention module.
_verified: weakref.WeakKeyDictionary[torch.nn.Module, set[Any]] = weakref.WeakKeyDictionary()


class _WatchedName(str):
    """The name of an attention function, watched.

    It is found in transformers' tables under a name of its own, but equals the name it stands for: models compare
    ``config._attn_implementation == "eager"`` and the like, and must take the branch that they take unwatched.
    """

    base: str

    def __new__(cls, base: str) -> Self:
        made = super().__new__(cls, _PREFIX + base)
        made.base = base
        return made

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or self.base == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return (str, (self.base,))  # a copied configuration is not watched


class Watch:
    """What a watch has seen; made by :func:`watch`.

    Attributes
    ----------
    names : dict of int to str
        Path of each attention module by its layer.
    seen : dict of int to int
        Calls observed by layer.
    """

    def __init__(self, model: PreTrainedModel, observer: Observer, layers: Iterable[int] | None) -> None:
        self._model = model
        self._observer = observer
        self._found = find_attention(model)
        self.names = {layer: name for layer, (name, _) in self._found.items()}
        self._wanted = self._choose(layers)
        self.seen: dict[int, int] = {}
        self._reasons: dict[int, str] = {}
        self._layer_of = {id(module): layer for layer, (_, module) in self._found.items()}

    def _choose(self, layers: Iterable[int] | None) -> set[int]:
        if layers is None:
            return set(self.names)
        wanted = set(layers)
        unknown = sorted(wanted - set(self.names))
        if unknown:
            there = f"{min(self.names)} to {max(self.names)}" if self.names else "none"
            raise InputError("layers", unknown, f"the model's attention layers are allowed: {there}")
        return wanted

    @property
    def unseen(self) -> dict[int, str]:
        """Layers that were wanted and not seen, each with the reason."""
        return {
            layer: self._reasons.get(layer, self._why(layer))
            for layer in sorted(self._wanted)
            if layer not in self.seen
        }

    def _why(self, layer: int) -> str:
        module = self._found[layer][1]
        if _source(module) is None:
            return f"{type(module).__name__} computes attention by itself, not through transformers' AttentionInterface"
        return "it did not call its attention function"

    def check(self) -> None:
        """Raise InputError unless every wanted layer was seen; it names those that were and those that were not."""
        missing = self.unseen
        if not missing and self.seen:
            return
        reasons = "; ".join(dict.fromkeys(missing.values())) or "it has no attention layers"
        raise InputError(
            "model",
            type(self._model).__name__,
            f"layers not watched: {spans(missing)} ({reasons}); seen: {spans(self.seen)}",
        )

    def _modules(self) -> list[torch.nn.Module]:
        return [module for layer, (_, module) in self._found.items() if layer in self._wanted]

    def _show(
        self,
        module: torch.nn.Module,
        backend: str,
        q: Any,
        k: Any,
        v: Any,
        mask: Any,
        given: dict[str, Any],
        output: Any,
    ) -> None:
        layer = self._layer_of[id(module)]
        if layer in self._reasons:
            return
        try:
            call = self._describe(layer, module, backend, q, k, v, mask, given)
            self._verify(call, backend, mask is None, given, output)
        except Indescribable as error:
            self._reasons[layer] = str(error)
            self.seen.pop(layer, None)
            return
        self._observer(call)
        with _lock:  # several threads may run the model
            self.seen[layer] = self.seen.get(layer, 0) + 1

    def _verify(
        self, call: AttentionCall, backend: str, unmasked: bool, given: dict[str, Any], output: torch.Tensor
    ) -> None:
        """Hold the first call of each kind against the layer's output; of a mechanism of ours, which defines its own,
        only that it is finite."""
        kind = (backend, unmasked, call.q.shape[2] == 1)
        checked = _verified.setdefault(call.module, set())
        if kind in checked or given.get("dropout"):
            return
        if call.own is None:
            wrong = fault(call, output)
        else:  # statistics would take NaN for weights of 0
            wrong = None if bool(output.isfinite().all()) else "its output is not finite"
        if wrong is not None:
            raise Indescribable(wrong)
        checked.add(kind)

    def _describe(
        self,
        layer: int,
        module: torch.nn.Module,
        backend: str,
        q: Any,
        k: Any,
        v: Any,
        mask: Any,
        given: dict[str, Any],
    ) -> AttentionCall:
        causal = given.get("is_causal")
        seen = read_mask(
            mask,
            backend=getattr(module, "mask_convention", backend),
            q=q,
            k=k,
            causal=bool(getattr(module, "is_causal", True) if causal is None else causal),
            window=given.get("sliding_window"),
        )
        if given.get("position_bias") is not None:
            raise Indescribable("it adds a position bias to its scores, which is not watched")
        if given.get("softcap") is not None and backend == "sdpa":
            # Some versions of transformers leave the cap out here without a word.
            raise Indescribable("its scores are capped, which sdpa does not do: load it with attention='eager'")
        scale = given.get("scaling")
        sinks = next((given[name] for name in ("s_aux", "sinks") if isinstance(given.get(name), torch.Tensor)), None)
        return AttentionCall(
            layer=layer,
            name=self.names[layer],
            module=module,
            q=q.detach(),
            k=k.detach(),
            v=v.detach(),
            scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
            softcap=given.get("softcap"),
            sinks=None if sinks is None else sinks.detach().reshape(-1),
            visibility=seen,
            views=tuple((left.detach(), right.detach()) for left, right in given.get("views") or ()),
            own=of_module(module, given.get("x")),
        )


@contextmanager
def watch(model: PreTrainedModel, observer: Observer, layers: Iterable[int] | None = None) -> Iterator[Watch]:
    """Show every attention call of a model to an observer.

    The model computes with its own attention function, so that its outputs are bitwise those of the unwatched model.
    The observer runs without gradients, in the thread that runs the model, once the layer's output is there. Watches
    may be nested, and several threads may run the model.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model; restored when the block is left, however that happens.
    observer : callable
        Gets an :class:`AttentionCall`. What it raises ends the model's run.
    layers : iterable of int, optional
        Show these layers alone. Default: all.

    Yields
    ------
    Watch
        Which layers were seen, and which not and why.

    Raises
    ------
    InputError
        If there is no such layer.

    Notes
    -----
    A layer's first call is checked, once a model: two rows of the output are computed again from the call in float64,
    and a layer whose attention is something else (ALiBi, a relative position bias) is left out, with that reason in
    ``Watch.unseen``.
    """
    made = Watch(model, observer, layers)
    modules = made._modules()
    configs = _configs(model, modules)
    with _lock:
        for module in modules:
            _watches.setdefault(id(module), []).append(made)
        for config in configs:
            _rename(config)
    try:
        yield made
    finally:
        with _lock:
            for config in configs:
                _restore(config)
            for module in modules:
                _watches[id(module)].remove(made)
                if not _watches[id(module)]:
                    del _watches[id(module)]


def spans(layers: Iterable[int]) -> str:
    """Layers as people write them: ``0-3, 7``."""
    parts: list[list[int]] = []
    for layer in sorted(layers):
        if parts and layer == parts[-1][1] + 1:
            parts[-1][1] = layer
        else:
            parts.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts) or "none"


def find_attention(model: torch.nn.Module) -> dict[int, tuple[str, torch.nn.Module]]:
    """A model's attention modules, by layer.

    Layers are the modules' own ``layer_idx``, or the first number in their path; where these repeat (an encoder and a
    decoder), the modules are counted in the model's order.
    """
    found = [(name, module) for name, module in model.named_modules() if _source(module) is not None]
    inside = {id(module) for _, module in found}
    for name, module in model.named_modules():
        # Attention that transformers' interface does not know of: named, so that its layers can be reported missing.
        if "attention" in type(module).__name__.lower() and id(module) not in inside:
            below = [inner for inner in module.modules() if inner is not module]
            if not any(id(inner) in inside or "attention" in type(inner).__name__.lower() for inner in below):
                found.append((name, module))
    order = {id(module): place for place, module in enumerate(model.modules())}
    found.sort(key=lambda item: order[id(item[1])])
    numbers = [_index(name, module) for name, module in found]
    if None in numbers or len(set(numbers)) < len(numbers):
        numbers = list(range(len(found)))
    return dict(sorted(zip([int(n or 0) for n in numbers], found, strict=True)))


def _index(name: str, module: torch.nn.Module) -> int | None:
    own = getattr(module, "layer_idx", None)
    if isinstance(own, int) and not isinstance(own, bool) and own >= 0:
        return own
    digits = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(digits.group(1)) if digits else None


def _source(module: Any) -> tuple[Any, Callable[..., Any]] | None:
    """The table of attention functions that a module looks into, and its own eager function; None if neither."""
    kind: Any = type(module)  # whose own hash a type checker takes for the module's
    return _source_of(kind)


@cache
def _source_of(kind: Any) -> tuple[Any, Callable[..., Any]] | None:
    for base in kind.__mro__:
        for function in vars(base).values():
            function = inspect.unwrap(function) if callable(function) else function
            code = getattr(function, "__code__", None)
            if code is None or "ALL_ATTENTION_FUNCTIONS" not in code.co_names:
                continue
            names = [name for name in code.co_names if "eager" in name and name in function.__globals__]
            if len(names) == 1:
                return function.__globals__["ALL_ATTENTION_FUNCTIONS"], function.__globals__[names[0]]
    return None


def _configs(model: torch.nn.Module, modules: list[torch.nn.Module]) -> list[Any]:
    """Configurations that name the attention function of the modules, or the mask function of a model around them."""
    from transformers import PreTrainedModel

    wanted = {id(module) for module in modules if _source(module) is not None}
    found: dict[int, Any] = {}
    for module in model.modules():
        around = isinstance(module, PreTrainedModel) and any(id(inner) in wanted for inner in module.modules())
        config = getattr(module, "config", None)
        if (around or id(module) in wanted) and isinstance(getattr(config, "_attn_implementation_internal", None), str):
            found[id(config)] = config
    return list(found.values())


def _rename(config: Any) -> None:
    kept, count = _renamed.get(id(config), (config, 0))
    if not count:
        name = config._attn_implementation_internal
        _register(name)
        # The public setter would write to nested configurations too, whose names may differ.
        config._attn_implementation_internal = _WatchedName(name)
    _renamed[id(config)] = (kept, count + 1)


def _restore(config: Any) -> None:
    kept, count = _renamed.pop(id(config))
    if count > 1:
        _renamed[id(config)] = (kept, count - 1)
        return
    name = config._attn_implementation_internal
    if isinstance(name, _WatchedName):  # else somebody has chosen another since
        config._attn_implementation_internal = name.base


@cache
def _register(base: str) -> None:
    """Enter the watched name into transformers' tables. It stays there: a thread may still be on its way to it."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    name = str(_PREFIX + base)
    AttentionInterface.register(name, _attention_function(base))
    if base in ALL_MASK_ATTENTION_FUNCTIONS:

        def mask_function(*args: Any, **kwargs: Any) -> Any:
            return ALL_MASK_ATTENTION_FUNCTIONS[base](*args, **kwargs)

        AttentionMaskInterface.register(name, mask_function)


@torch.compiler.disable
def _own_function(module: torch.nn.Module, base: str) -> Callable[..., Any]:
    """What the module would have called."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    source = _source(module)
    if source is None:  # it shares a watched module's configuration, and looks its function up in a way of its own
        return ALL_ATTENTION_FUNCTIONS[base]
    return source[0].get_interface(base, source[1])


@torch.compiler.disable  # a compiled model breaks off here, instead of compiling the observer into its graph
@torch.no_grad()
def _tell(module: torch.nn.Module, *call: Any) -> None:
    """Show a call to all who watch the module."""
    for made in tuple(_watches.get(id(module), ())):
        made._show(module, *call)


def _attention_function(base: str) -> Callable[..., Any]:
    def attention(module: torch.nn.Module, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        result = _own_function(module, base)(module, query, key, value, mask, **kwargs)
        _tell(module, base, query, key, value, mask, kwargs, result[0])
        return result

    return attention
