"""What Triton's interpreter (TRITON_INTERPRET=1) needs beside numpy 2.4. Imports triton: call it lazily."""

from __future__ import annotations


def let_numpy_index_tensors() -> None:
    """Let the interpreter take the number in a one-element array; Triton 3.6 calls int() on it, which numpy refuses."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):  # type: ignore[no-untyped-def]  # Triton's own, without types
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
