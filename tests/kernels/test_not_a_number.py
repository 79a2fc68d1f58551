"""Scores of threshold attention that are no numbers: NaN in the rows that have them, and in no other."""

from __future__ import annotations

import math

import pytest
import torch
from theory_kernels import differential_threshold_attention, threshold_attention

# numpy, in Triton's interpreter, says where numbers end.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SCREENED = {"screen_from": 0}
PATHS = {
    "reference": ("reference", {}, False),
    "chunked": ("chunked", {}, False),
    "few rows": ("triton", {}, False),
    "dense": ("triton", {"screen_from": 1 << 20}, False),
    "tiles": ("triton", SCREENED, False),
    "lists": ("triton", SCREENED, True),
}


@pytest.mark.parametrize(
    ("what", "views", "power", "path"),
    [
        *(("key", 1, 2.0, path) for path in PATHS),
        *(("infinite key", 2, 1.0, path) for path in ("reference", "chunked", "tiles")),
        *(("query", 1, 1.5, path) for path in ("chunked", "dense", "lists")),
    ],
)
def test_rows_of_scores_that_are_no_numbers(
    what: str, views: int, power: float, path: str, device: torch.device, triton: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    implementation, options, listed = PATHS[path]
    if listed:
        from theory_kernels.attention import plan

        for name, value in {"LIST_FROM": 0, "LIST_FROM_KEYS": 0, "LIST_LENGTH": 0, "LIST_MOST": 2000}.items():
            monkeypatch.setattr(plan, name, value)
        monkeypatch.setattr(plan, "LIST_SHARE", math.inf)
    n, t = 70, 5 if path == "few rows" else 70
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((1, 2, n, 16), generator=g) for _ in range(3))
    bad = torch.zeros(n, dtype=torch.bool)
    if what == "query":
        q[0, 0, 67, 2], bad[67] = math.nan, True
    else:
        # A key that only the last rows see, so that its tile is not the only one of the row.
        k[0, 0, 66, 0], bad[66:] = math.nan if what == "key" else math.inf, True
    operands = [x.to(device).requires_grad_() for x in (q[:, :, n - t :], k, v)]
    options = {**options, "beta": 0.8, "power": power, "query_offset": n - t, "implementation": implementation}
    if views == 2:
        other = [torch.randn((1, 2, m, 16), generator=g).to(device) for m in (t, n)]
        # The number that is none stands in the second view.
        out = differential_threshold_attention(*other, *operands, lam=0.5, **options)
    else:
        out = threshold_attention(*operands, **options)
    assert out.detach().isnan().any(-1)[0, 0].tolist() == bad[n - t :].tolist()
    assert out.detach().isnan().all(-1)[0, 0].tolist() == bad[n - t :].tolist()
    dq, dk, dv = torch.autograd.grad(out.sum(), operands)
    # What the gradient of a value is made of: the weights of all rows that see it.
    assert bool(dv[0, 0, 66].isnan().all())
    assert all(bool(x.detach()[0, 1].isfinite().all()) for x in (out, dq, dk, dv))
