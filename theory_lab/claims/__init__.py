"""The claims: one file a paper, found by id."""

from __future__ import annotations

from theory_lab.claims import tda
from theory_lab.claims.base import Claim, Kind, Point, Statistic
from theory_lab.errors import InputError, hint

__all__ = ["CLAIMS", "Claim", "Kind", "Point", "Statistic", "get_claim"]

CLAIMS: dict[str, Claim] = {claim.id: claim for claim in tda.CLAIMS}


def get_claim(claim_id: str) -> Claim:
    """Return the claim with that id; InputError, with the nearest id, if there is none."""
    if claim_id not in CLAIMS:
        raise InputError("claim", claim_id, f"{hint(claim_id, CLAIMS)}known: {', '.join(CLAIMS)}")
    return CLAIMS[claim_id]
