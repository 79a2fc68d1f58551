"""Every statement that can be checked, whatever its kind, by id and in the order of the papers."""

from __future__ import annotations

from theory_lab.claims import CLAIMS
from theory_lab.claims.base import Claim, Statement
from theory_lab.errors import InputError, hint
from theory_lab.studies import STUDIES, Study

__all__ = ["CATALOG", "Claim", "Study", "find"]

_GROUPS = {"tda": 0, "tra": 0, "asentmax": 1, "eta": 2, "ours": 3}


def _ordered() -> dict[str, Statement]:
    everything: list[Statement] = [*CLAIMS.values(), *STUDIES.values()]
    # General forms stand beside the theorem they generalize, whoever stated them.
    return {s.id: s for s in sorted(everything, key=lambda s: _GROUPS[s.id.split("-")[0]])}


CATALOG: dict[str, Statement] = _ordered()


def find(statement_id: str) -> Statement:
    """Return the statement with that id; InputError, with the nearest id, if there is none."""
    if statement_id not in CATALOG:
        raise InputError("claim", statement_id, f"{hint(statement_id, CATALOG)}known: {', '.join(CATALOG)}")
    return CATALOG[statement_id]
