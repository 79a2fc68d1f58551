"""The product as a whole is calibrated: over many seeds it errs no more often than it says, and sees what it must.

These are checks of the self-test at its standard size; ``theory-lab selftest --size nightly`` draws ten times as much,
and the quick size of all the others runs in ``tests/selftest``.
"""

from __future__ import annotations

import pytest

from theory_lab.selftest import Certificate, Setup, verdicts
from theory_lab.selftest.base import Check
from theory_lab.selftest.certificate import Group


@pytest.mark.parametrize("check", [verdicts.power, verdicts.true_cases], ids=lambda c: c.__name__)
def test_standard_size(check: Check) -> None:
    """Controls are flagged in 100 runs each, true cases never."""
    setup = Setup("standard", 0)
    found = Certificate.of(setup, (Group("some", tuple(check(setup)), 0.0),), complete=False)
    assert found.passed, found.to_text(full=True)
