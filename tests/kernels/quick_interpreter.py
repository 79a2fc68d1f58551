"""Triton's interpreter without work whose result nobody sees, which is most of what it does. Imports triton.

Nothing that a kernel computes or that the interpreter checks is left out:

- Around each sum and product of integers it computes whether they overflow, and drops the answer unless it debugs.
- At each call of a device function it patches ``triton.language`` again, which the kernel's launch has done.
- At each launch it looks for what there is to patch in all of ``triton.language``, and finds the same as before.
- For each value it makes the table from Triton's types to numpy's anew, and the shape of its block.
"""

from __future__ import annotations

import dataclasses
import functools
from types import FunctionType
from typing import Any

import triton.language as tl
from triton.language import core
from triton.runtime import interpreter


def quicken() -> None:
    """Patch the interpreter; once a process, after every other patch of it."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _Patches()
    interpreter._get_np_dtype = functools.partial(_numpy_type, interpreter._get_np_dtype, {})

    core.block_type.__init__ = _known_types(core.block_type.__init__)
    core.tensor.__init__ = _known_shapes(core.tensor.__init__)


def _known_types(original: Any) -> Any:
    """Checks, counts and names each type of a block once."""
    known: dict[Any, dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([x.value if isinstance(x, core.constexpr) else x for x in shape])
        # The name of a pointer does not say all of its type.
        key = None if element_ty.is_ptr() else (element_ty.name, *sizes)
        if key is None or key not in known:
            original(self, element_ty, shape)
            if key is not None and all(type(x) is int for x in sizes):
                known[key] = {name: x for name, x in vars(self).items() if name != "element_ty"}
        else:
            self.element_ty = element_ty
            self.__dict__.update(known[key])

    return init


def _known_shapes(original: Any) -> Any:
    """Makes the shape of the values of each type once."""
    known: dict[str, tuple[Any, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        if type.name not in known:
            original(self, handle, type)
            known[type.name] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known[type.name]

    return init


def _numpy_type(original: Any, known: dict[str, Any], kind: Any) -> Any:
    kind = getattr(kind, "element_ty", kind) if kind.is_block() else kind
    if kind.is_ptr():
        return original(kind)
    if kind.name not in known:
        known[kind.name] = original(kind)
    return known[kind.name]


class _Patches:
    """Stands in for ``_patch_lang``: patches what is not patched, by the list that was once found."""

    def __init__(self) -> None:
        self._original = interpreter._patch_lang
        #: Changes (object, name, value) by which of ``tl`` and ``tl.core`` are patched and which a function sees.
        self._known: dict[tuple[frozenset[int], frozenset[int]], list[tuple[Any, str, Any]]] = {}
        self._seen: dict[FunctionType, frozenset[int]] = {}
        self._launch: _Scope | None = None

    def __call__(self, fn: FunctionType) -> interpreter._LangPatchScope:
        """Patch for a kernel or for what it calls; Triton restores the former alone, which takes the latter along."""
        if fn not in self._seen:
            self._seen[fn] = frozenset(id(x) for x in fn.__globals__.values() if x is tl or x is tl.core)
        langs, scope = self._seen[fn], self._launch or _Scope(self)
        if not langs or not langs <= scope.langs:
            key = scope.langs, langs
            if key in self._known:
                for change in self._known[key]:
                    scope.set_attr(*change)
            else:
                found = self._original(fn)._changes
                self._known[key] = [(obj, name, getattr(obj, name)) for obj, name, _ in found]
                scope._changes += found
            scope.langs |= langs
        if self._launch is not None:
            return interpreter._LangPatchScope()
        self._launch = scope
        return scope


class _Scope(interpreter._LangPatchScope):
    """What one launch has patched."""

    def __init__(self, patches: _Patches) -> None:
        super().__init__()
        self.langs: frozenset[int] = frozenset()
        self._patches = patches

    def restore(self) -> None:
        super().restore()
        self._patches._launch = None
