"""Counts and active sets, exactly: inputs on a binary grid make every float32 sum exact in any order."""

from __future__ import annotations

import pytest
import torch
from theory_kernels import consensus_counts, survivor_counts, threshold_attention

FORMS = [("chunked", None), ("triton", 10**6), ("triton", 0)]


def _grid(g: torch.Generator, shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Multiples of 1/8 up to 2: products are multiples of 1/64, their sums exact in float32."""
    x = torch.randint(-16, 17, shape, generator=g) / 8.0
    if kind == "zeros":
        x[torch.rand(shape[:-1], generator=g) < 0.5] = 0.0
    if kind == "outlier":
        # One huge entry a head makes the int8 scale of all its keys coarse.
        x[..., 0, 0] = 2.0**7
    if kind == "scales":
        x = x * 2.0 ** torch.randint(-6, 3, shape[:-1], generator=g)[..., None]
    if kind == "sparse":
        x = x * (torch.rand(shape, generator=g) < 0.1)
    return x.to(dtype)


def _problem(kind: str, batch: int, t: int, d: int, seed: int, device: torch.device):
    g = torch.Generator().manual_seed(seed)
    q = _grid(g, (batch, 2, t, d), kind, torch.bfloat16)
    k = _grid(g, (batch, 1, t, d), kind, torch.bfloat16)
    score = q.double() @ k.double().transpose(-1, -2)
    # Adversarial thresholds: for each row a score of its own (a tie, no survivor), the same one float32 step
    # lower (a survivor), or a level that few keys pass.
    pick = torch.randint(0, t, (batch, 2, t, 1), generator=g)
    pick = torch.minimum(pick, torch.arange(t)[None, None, :, None])
    tie = score.gather(-1, pick)[..., 0].float()
    below = torch.nextafter(tie, torch.tensor(-torch.inf))
    rare = score.amax(-1).float() - 1 / 128
    which = torch.randint(0, 3, tie.shape, generator=g)
    tau = torch.where(which == 0, tie, torch.where(which == 1, below, rare))
    return q.to(device), k.to(device), tau.to(device)


@pytest.mark.parametrize("kind", ["plain", "zeros", "outlier", "scales", "sparse"])
def test_active_set_small(kind: str, device: torch.device, triton: str, poisoned: None) -> None:
    q, k, tau = _problem(kind, 1, 70, 16, 0, device)
    want = survivor_counts(q.double(), k.double(), tau, implementation="reference")
    assert want.any()
    for implementation, screen_from in FORMS:
        got = survivor_counts(q, k, tau, implementation=implementation, screen_from=screen_from)
        assert torch.equal(got, want), (implementation, screen_from)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["plain", "zeros", "outlier", "scales", "sparse"])
def test_active_set_of_ten_thousand_heads(kind: str, device: torch.device, triton: str) -> None:
    """2,500 batches of 2 heads for each of 5 kinds: 25,000 score matrices, each compared row by row."""
    for part in range(5):
        q, k, tau = _problem(kind, 500, 150, 32, part, device)
        want = survivor_counts(q.double(), k.double(), tau, implementation="reference")
        for screen_from in (0, 10**6):
            got = survivor_counts(q, k, tau, implementation="triton", screen_from=screen_from)
            assert torch.equal(got, want), (part, screen_from)


@pytest.mark.parametrize("implementation", ["chunked", "triton"])
def test_attention_uses_the_same_active_set(implementation: str, device: torch.device, triton: str) -> None:
    """With p = 1 and v = 1 the output is the summed excess: positive exactly where a row has a survivor."""
    q, k, _ = _problem("plain", 1, 40, 16, 1, device)
    v = torch.ones((1, 1, 40, 1), dtype=torch.bfloat16, device=device)
    out = threshold_attention(
        q, k, v, beta=30.0, power=1.0, normalize=False, implementation=implementation, screen_from=0
    )
    row = torch.arange(1, 41, dtype=torch.float64, device=device)
    tau = torch.tensor(30.0, device=device) * (2 * row.log() / 16).sqrt().float()
    want = survivor_counts(q.double(), k.double(), tau, implementation="reference") > 0
    assert torch.equal(out[..., 0] > 0, want)
    assert want.any()
    assert not want.all()


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": False}, {"lengths": [33, 7]}, {"query_offset": -5}, {"query_lengths": [40, 20]},
     {"cu_seqlens": [0, 11, 40], "cu_seqlens_k": [0, 25, 40], "query_offset": [14, -3], "max_seqlen": 29}], ids=str,
)  # fmt: skip
@pytest.mark.parametrize(("implementation", "screen_from"), FORMS)
def test_consensus(
    options: dict, implementation: str, screen_from: int | None, device: torch.device, triton: str
) -> None:
    batch = 1 if "cu_seqlens" in options else 2
    q1, k1, tau = _problem("plain", batch, 40, 16, 2, device)
    q2, k2, tau2 = _problem("zeros", batch, 40, 16, 3, device)
    options = {k: torch.tensor(v, device=device) if isinstance(v, list) else v for k, v in options.items()}
    tau, tau2 = tau / 4, tau2 / 4
    wide = [x.double() for x in (q1, k1, q2, k2)]
    want = consensus_counts(*wide, tau, tau2, implementation="reference", **options)
    got = consensus_counts(q1, k1, q2, k2, tau, tau2, implementation=implementation, screen_from=screen_from, **options)
    assert want.any()
    assert torch.equal(got, want)


@pytest.mark.parametrize(("implementation", "screen_from"), FORMS)
def test_packed_sequences_are_apart(
    implementation: str, screen_from: int | None, device: torch.device, triton: str
) -> None:
    """Each packed sequence has the counts that it has alone."""
    q, k, tau = _problem("plain", 1, 60, 16, 4, device)
    tau = tau / 4
    cu = torch.tensor([0, 25, 26, 60], dtype=torch.int32, device=device)
    got = survivor_counts(q, k, tau, cu_seqlens=cu, implementation=implementation, screen_from=screen_from)
    alone = [
        survivor_counts(q[:, :, a:b], k[:, :, a:b], tau[:, :, a:b], implementation="reference")
        for a, b in ((0, 25), (25, 26), (26, 60))
    ]
    assert torch.equal(got, torch.cat(alone, 2))
    assert got.any()


def test_normalized_scores_and_scalars(device: torch.device) -> None:
    """Every key equals every query: cosine 1, so all i + 1 visible keys survive 0.5 and none survives 1.5."""
    x = torch.full((1, 1, 6, 8), 3.0, device=device)
    assert survivor_counts(x, x, 0.5, normalize=True)[0, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert not survivor_counts(x, x, 1.5, normalize=True).any()
