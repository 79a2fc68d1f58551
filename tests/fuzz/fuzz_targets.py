"""All targets."""

from __future__ import annotations

import fuzz_files
import fuzz_models
from fuzz_harness import Target

TARGETS: tuple[Target, ...] = (*fuzz_files.TARGETS, *fuzz_models.TARGETS)
