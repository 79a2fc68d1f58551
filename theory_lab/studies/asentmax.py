"""The claims of ASEntmax (arXiv 2506.16640), each with the controls that must fail.

The paper replaces softmax by alpha-entmax with a learned temperature and argues that attention then neither vanishes
nor disperses nor lets representations collapse as the context grows. The work itself is in ``asentmax_rows`` and
``asentmax_support`` (searches over rows), ``asentmax_paths``, ``asentmax_dispersion`` and ``asentmax_collapse``.
"""

from __future__ import annotations

from collections.abc import Callable

from theory_lab.errors import InputError
from theory_lab.studies import (
    asentmax_collapse,
    asentmax_dispersion,
    asentmax_paths,
    asentmax_rows,
    asentmax_support,
)
from theory_lab.studies.base import Piece, Request, Study

_NON_VANISHING = "arXiv 2506.16640, non-vanishing attention"
_DISPERSION = "arXiv 2506.16640, dispersion"
_RESILIENCE = "arXiv 2506.16640, concentration resilience"
_PRESERVATION = "arXiv 2506.16640, representational preservation"
_TEMPERATURE = "arXiv 2506.16640, learnable temperature"

#: Seconds a thousand cases on one core, by what is searched.
_COST = {"1.5": 0.04, "2.0": 0.03, "exact": 0.2, "softmax": 0.03}
_LENGTHS = (16, 256, *(1 << k for k in range(12, 25, 2)))


def _searches(study: str, parts: dict[str, int], **more: bool) -> Callable[[Request], list[Piece]]:
    """A plan of one search a part, with its default number of cases."""

    def plan(request: Request) -> list[Piece]:
        pieces = []
        for part, cases in parts.items():
            # Rational arithmetic costs ten times as much: it gets the same share of a request as of the default.
            asked = request.trials and (max(8, request.trials // 10) if part == "exact" else request.trials)
            trials = asked or cases
            pieces.append(Piece.of(study, _COST[part] * trials / 1000.0, part=part, trials=trials, **more))
        return pieces

    return plan


def _plan_dispersion(request: Request) -> list[Piece]:
    lengths = sorted({n for n in request.length or _LENGTHS if n >= 2})
    pieces = []
    for law in asentmax_dispersion.LAWS:
        if request.noise is not None and law not in request.noise:
            continue
        own = [n for n in lengths if law != "rademacher" or n <= asentmax_dispersion.LONGEST_ATOM]
        if own:
            # Entropies of a Gaussian row scatter, so its slopes rest on more lengths than are shown.
            between = [1 << k for k in range(12, 23)] if law == "gaussian" and not request.length else []
            trials = request.trials or asentmax_dispersion.DEFAULT_TRIALS
            cost = 4e-8 * sum(max(2 * n, min(trials * n, 1 << 21)) for n in own + between) + 0.1
            pieces.append(Piece.of("asentmax-dispersion", cost, law=law, lengths=own, between=between, trials=trials))
    return pieces


def _plan_paths(request: Request) -> list[Piece]:
    trials = request.trials or 100_000
    return [Piece.of("asentmax-paths", 0.5 + 4e-6 * trials, trials=trials)]


def _plan_collapse(request: Request) -> list[Piece]:
    # The last row belongs to the query group that looks for the needle, hence multiples of four.
    asked = request.length or tuple(1 << k for k in range(6, 21))
    if min(asked) < 8:
        raise InputError("length", min(asked), "asentmax-collapse needs rows of at least 8 keys")
    lengths = sorted({min(max(8, -(-n // 4) * 4), 1 << 22) for n in asked})
    return [Piece.of("asentmax-collapse", 0.2 + 1.5e-6 * lengths[-1], lengths=lengths)]


STUDIES: tuple[Study, ...] = (
    Study(
        id="asentmax-nonvanishing",
        kind="invariance",
        paper="asentmax",
        source=_NON_VANISHING,
        statement=(
            "Appending tokens whose (alpha-1) z is at most the threshold leaves every other weight of alpha-entmax "
            "unchanged; softmax shrinks every weight by 1 / (1 + exp(z_new - LSE)), strictly, and its largest weight "
            "is at most 1 / (1 + (n-1) exp(-(M-m))) for scores in [m, M]."
        ),
        bound_text="change <= 1 ulp (0 in rationals); errors of the identities <= their rounding budget",
        assumptions=("(alpha-1) z_new <= tau(z), decided exactly", "alpha 1.5 or 2, sort-based solver"),
        exact_text="sparsemax in rational arithmetic",
        parameters=(),
        plan=_searches("asentmax-nonvanishing", {"1.5": 25_000, "2.0": 40_000, "softmax": 20_000, "exact": 4_000}),
        work=asentmax_rows.work_nonvanishing,
        needs_torch=True,
    ),
    Study(
        id="asentmax-dispersion",
        kind="rate",
        paper="asentmax",
        source=_DISPERSION,
        statement=(
            "Softmax over bounded logits disperses completely: H / log n tends to 1. Entmax has H <= log s, and does "
            "not disperse where its support s stays o(n)."
        ),
        bound_text="log n - H <= M - m and H <= log s at every length; slopes of H on log n",
        assumptions=("independent logits", "softmax: bounded logits", "entmax: no atom at the top of the law"),
        exact_text="entmax over a bounded law with a positive density at its end: limit 1/alpha; softmax: 1",
        parameters=("noise", "length"),
        plan=_plan_dispersion,
        work=asentmax_dispersion.work,
    ),
    Study(
        id="asentmax-concentration",
        kind="invariance",
        paper="asentmax",
        source=_RESILIENCE,
        statement="The entropy of alpha-entmax is at most log s, s its support; s <= n^b bounds H / log n by b.",
        bound_text="H - log s <= its rounding budget (0 in whole numbers)",
        assumptions=("none",),
        exact_text="sparsemax in whole numbers: N^N <= s^N prod a_j^(a_j)",
        parameters=(),
        plan=_searches("asentmax-concentration", {"1.5": 50_000, "2.0": 50_000, "exact": 4_000}),
        work=asentmax_support.work_concentration,
        needs_torch=True,
    ),
    Study(
        id="asentmax-paths",
        kind="invariance",
        paper="asentmax",
        source=_PRESERVATION,
        statement=(
            "Through L causal layers at most s^L paths of non-zero weight lead into the last token, s the largest "
            "support of a row; dense layers have exactly C(n+L-1, L)."
        ),
        bound_text="paths - s^L <= 0, counted in whole numbers",
        assumptions=("every row has at most s supported keys", "dense: no weight underflows"),
        exact_text="C(n+L-1, L) for dense layers",
        parameters=(),
        plan=_plan_paths,
        work=asentmax_paths.work,
        needs_torch=True,
    ),
    Study(
        id="asentmax-collapse",
        kind="rate",
        paper="asentmax",
        source=_PRESERVATION,
        statement=(
            "What an early token leaves in the last one vanishes under softmax like 1/n (times log n for every layer "
            "but the first), and does not decay under entmax while the token stays in a bounded support."
        ),
        bound_text="slope of the log distance on log n: at most -1 + 0.05 for softmax, at least -0.01 for entmax",
        assumptions=("bounded logits", "entmax: the early token stays in a support of bounded size"),
        exact_text="limits of the slopes",
        parameters=("length",),
        plan=_plan_collapse,
        work=asentmax_collapse.work,
    ),
    Study(
        id="asentmax-theta",
        kind="invariance",
        paper="asentmax",
        source=_TEMPERATURE + ", as printed",
        statement="With entmax(z / theta), a larger theta is sparser: the support does not grow with theta.",
        bound_text="keys gained as theta grows <= 0",
        assumptions=("theta divides the scores",),
        exact_text="none",
        parameters=(),
        plan=_searches("asentmax-theta", {"1.5": 50_000, "2.0": 50_000}, printed=True),
        work=asentmax_support.work_theta,
        needs_torch=True,
    ),
    Study(
        id="asentmax-theta-corrected",
        kind="invariance",
        paper="asentmax",
        source=_TEMPERATURE + ", direction corrected here",
        statement="With entmax(z / theta), a larger theta is denser: the support does not shrink as theta grows.",
        bound_text="keys lost as theta grows <= 0",
        assumptions=("theta divides the scores",),
        exact_text="sparsemax in rational arithmetic",
        parameters=(),
        plan=_searches("asentmax-theta-corrected", {"1.5": 50_000, "2.0": 50_000, "exact": 4_000}, printed=False),
        work=asentmax_support.work_theta,
        needs_torch=True,
    ),
)
