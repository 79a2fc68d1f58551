"""Experiments to test with."""

from __future__ import annotations

SMALL = """\
title = "Small"
source = "S"
caption = "C"
kind = "check"

[settings]
claims = ["tda-4.3"]
noise = ["gaussian", "two-point"]
length = [2, 8, 512]
trials = 1000

[quick]
length = [2, 8]

[draw]
as = "bounds"
"""

RECORD = """\
title = "Losses"
source = "S"
caption = "C"
kind = "record"
needs = "trained models"

[settings]
shape = "table"

[draw]
as = "table"

[paper]
source = "Table 9"
columns = [{ name = "loss" }, { name = "good", unit = "%" }, { name = "finite" }]

[paper.rows]
"A_b" = ["3.1190", "~40", "yes"]
"C" = ["-", "-", "no"]
"""
