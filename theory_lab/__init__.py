"""Theory Lab: checks what papers claim about attention mechanisms.

``import theory_lab`` is cheap: nothing heavy is imported until it is used, and torch only where a model or a
kernel is touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from theory_lab.errors import InputError, StoreError, TheoryLabError

if TYPE_CHECKING:
    from theory_lab.experiments import check

__version__ = "0.1.0"

__all__ = ["InputError", "StoreError", "TheoryLabError", "__version__", "check"]


def __getattr__(name: str) -> Any:
    if name == "check":
        from theory_lab.experiments import check

        return check
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
