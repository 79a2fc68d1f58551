"""Studies: claims with a checker of their own, one file a subject."""

from __future__ import annotations

from theory_lab.studies.base import Finding, Piece, Request, Study

__all__ = ["STUDIES", "Finding", "Piece", "Request", "Study"]


def _collect() -> dict[str, Study]:
    from theory_lab.studies import asentmax, eta, ours, tda

    found: dict[str, Study] = {}
    for module in (tda, asentmax, eta, ours):
        for study in module.STUDIES:
            assert study.id not in found, study.id
            found[study.id] = study
    return found


STUDIES: dict[str, Study] = _collect()
