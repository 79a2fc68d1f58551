"""The captured step against the eager one; on a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_runs import losses

from theory_lab.training import NotFinite, train

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def column(folder: Path, index: int) -> np.ndarray:
    return np.array([float(row[index]) for row in losses(folder)])


@pytest.mark.parametrize(
    ("attention", "accumulation"),
    [("softmax", 1), ("tda", 1), ("tda", 2), ("asentmax", 1), ("eta-logit", 1), ("diff-rela", 1)],
)
def test_captured_step_computes_what_the_eager_one_does(
    tiny, tmp_path: Path, attention: str, accumulation: int
) -> None:
    shared = {"attention": attention, "device": "cuda", "dtype": "float32", "accumulation": accumulation, "steps": 40}
    for name, graph in (("eager", False), ("again", False), ("graph", True)):
        train(tiny(**shared, graph=graph, out=str(tmp_path / name), save_every=0))
    eager, again, graph = (column(tmp_path / name, 1) for name in ("eager", "again", "graph"))
    assert len(graph) == 40
    assert graph[-1] < graph[0]
    # The same arithmetic, launched otherwise; training amplifies what rounding there is, so the first steps decide.
    spread = np.abs(eager - again)[:10].max()
    assert np.abs(graph - eager)[:10].max() <= 2 * spread + 40 * np.finfo(np.float32).eps * eager[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # what the compiler says of itself: as an error it would end the compilation
@pytest.mark.parametrize("attention", ["softmax", "tda"])
def test_compiled_step_computes_what_the_eager_one_does(tiny, tmp_path: Path, attention: str) -> None:
    """Closer to the eager step in float32 than rounding to bfloat16 is, by far."""
    shared = {"attention": attention, "device": "cuda", "steps": 10, "save_every": 0}
    kinds = {"exact": {"graph": False}, "rounded": {"graph": False, "dtype": "bfloat16"}, "compiled": {"compile": True}}
    for name, more in kinds.items():
        result = train(tiny(**{**shared, "dtype": "float32", **more}, out=str(tmp_path / name)))
        assert result.record["compiled"] == result.record["graph"] == (name == "compiled")
    exact, rounded, compiled = (column(tmp_path / name, 1) for name in kinds)
    assert np.abs(compiled - exact).max() <= 0.05 * np.abs(rounded - exact).max()


def test_captured_run_continues_from_a_checkpoint(tiny, tmp_path: Path) -> None:
    shared = {"attention": "tda", "device": "cuda", "dtype": "float32", "steps": 40, "graph": True, "save_every": 7}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(tiny(**shared, out=str(whole)))
    train(tiny(**shared, out=str(cut)))
    (cut / "train.json").unlink()  # killed after step 35
    result = train(tiny(**shared, out=str(cut)))
    assert result.record["resumed_from"] == 35
    np.testing.assert_allclose(column(cut, 1), column(whole, 1), rtol=1e-4)
    assert [row[0] for row in losses(cut)] == [str(step) for step in range(1, 41)]


def test_captured_run_stops_at_a_loss_that_is_no_number(tiny, tmp_path: Path) -> None:
    with pytest.raises(NotFinite, match=r"at step \d+"):
        train(tiny(device="cuda", lr=1e12, lr_min=1e12, clip=float("inf"), warmup=0, steps=64, out=str(tmp_path / "m")))
