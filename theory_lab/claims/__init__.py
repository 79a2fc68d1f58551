"""The claims: one file a paper, found by id."""

from __future__ import annotations

import difflib

from theory_lab.claims import tda
from theory_lab.claims.base import Claim, Kind, Point, Statistic
from theory_lab.errors import InputError

__all__ = ["CLAIMS", "Claim", "Kind", "Point", "Statistic", "get_claim"]

CLAIMS: dict[str, Claim] = {claim.id: claim for claim in tda.CLAIMS}


def get_claim(claim_id: str) -> Claim:
    """Return the claim with that id; InputError, with the nearest id, if there is none."""
    if claim_id not in CLAIMS:
        near = difflib.get_close_matches(claim_id, CLAIMS, n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise InputError("claim", claim_id, f"{hint}known: {', '.join(CLAIMS)}")
    return CLAIMS[claim_id]
