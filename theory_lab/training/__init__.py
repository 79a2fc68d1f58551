"""Training of the model with pluggable attention: settings in, a folder that every command reads out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from theory_lab.training.settings import TrainSettings

if TYPE_CHECKING:
    from theory_lab.training.loop import Interrupted, TrainResult, settings_from, train
    from theory_lab.training.stepping import NotFinite

__all__ = ["Interrupted", "NotFinite", "TrainResult", "TrainSettings", "settings_from", "train"]


def __getattr__(name: str) -> Any:
    if name in ("Interrupted", "TrainResult", "settings_from", "train"):
        from theory_lab.training import loop

        return getattr(loop, name)
    if name == "NotFinite":
        from theory_lab.training.stepping import NotFinite

        return NotFinite
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
