"""Words that what computes and what draws must agree on."""

from __future__ import annotations

#: The series of what uniform attention gives: drawn gray, dashed, and behind the others.
BASELINE = "uniform attention"
