"""All targets."""

from __future__ import annotations

import fuzz_explorer
import fuzz_files
import fuzz_models
import fuzz_stores
import fuzz_words
from fuzz_harness import Target

TARGETS: tuple[Target, ...] = (
    *fuzz_files.TARGETS,
    *fuzz_models.TARGETS,
    *fuzz_words.TARGETS,
    *fuzz_stores.TARGETS,
    *fuzz_explorer.TARGETS,
)
