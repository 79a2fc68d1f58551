"""The self-test: is what is installed here as correct and as calibrated as it says?

``theory-lab selftest`` runs it and prints a certificate. See :mod:`theory_lab.selftest.base` for what a check is and
how the verdict is drawn.
"""

from __future__ import annotations

from theory_lab.selftest.base import LEVEL, SIZES, Finding, Setup
from theory_lab.selftest.certificate import Certificate
from theory_lab.selftest.running import GROUPS, run_selftest

__all__ = ["GROUPS", "LEVEL", "SIZES", "Certificate", "Finding", "Setup", "run_selftest"]
