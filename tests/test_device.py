"""``--device cuda``: the same rows from the kernel's stream. Without a GPU its CPU reference draws the same bits."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import theory_lab  # noqa: E402  # after the packages without which nothing here can run
from theory_lab.cases import build_cases, build_pieces, device_notes  # noqa: E402
from theory_lab.claims import Point  # noqa: E402
from theory_lab.errors import DeviceError, InputError  # noqa: E402
from theory_lab.estimation import BlockSum, Cell, default_trials, device, sampler, suits_gpu  # noqa: E402
from theory_lab.estimation.base import Sample  # noqa: E402
from theory_lab.estimation.intervals import interval  # noqa: E402
from theory_lab.experiments import COLUMNS, Budget, Settings, prepare, run  # noqa: E402
from theory_lab.streams import Streams  # noqa: E402

RESULTS = [name for name in COLUMNS if name != "seconds"]
GRID = {"noise": "gaussian", "length": [2, 100], "rho": [0.0, 0.5], "trials": 1500, "device": "cuda"}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "gpu" not in request.keywords:
        monkeypatch.setattr(device, "target", "cpu")


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "target", "cpu")
        return theory_lab.check(["tda-4.3", "tda-4.6"], **GRID, workers=1)


def test_every_law_agrees_with_its_exact_value() -> None:
    """At a familywise error of 1e-6."""
    found = theory_lab.check(
        ["tda-4.3", "tda-4.6"],
        noise=["gaussian", "uniform", "rademacher", "student-t:3"],
        length=[2, 40],
        kappa=[1, 20],
        rho=[0, 0.5, -0.4],
        trials=1500,
        estimator="direct",
        device="cuda",
        alpha=1e-6,
    )
    assert set(found.device) == {"cuda"}
    assert set(found.estimator) == {"direct"}
    assert (found.ci_low <= found.exact).all()
    assert (found.exact <= found.ci_high).all()
    assert ((found.estimate - found.exact).abs() <= 6 * found.standard_error + 1e-2).all()


@pytest.mark.parametrize("noise", ["gaussian", "uniform", "rademacher", "student-t(2.5)", "student-t(40)"])
@pytest.mark.parametrize("rho", [0.0, 0.7, -0.3])
def test_the_kernel_means_the_same_law(noise: str, rho: float) -> None:
    """Its tails, found without SciPy, are the exact values'; at n = sqrt(e) kappa, rademacher's atom is at tau."""
    from theory_kernels.exceedance import laws

    for point in (Point(noise, 1000, 40, rho=rho), Point(noise, 5, kappa=5 / math.sqrt(math.e), rho=rho)):
        law = device._noise(Cell("consensus", point, "direct", 0, "cuda"))
        p = laws.tail(law, point.tau)
        assert p == pytest.approx(point.law().tail(point.tau), rel=1e-9, abs=1e-15)
        exact = theory_lab.check("tda-4.6", noise=noise, length=point.length, head_dim=point.head_dim,
                                 kappa=point.kappa, sigma=point.sigma, rho=rho, estimator="exact").exact[0]  # fmt: skip
        assert point.length * laws.joint_tail(p, p, rho) == pytest.approx(exact, rel=1e-6, abs=1e-12)


def test_known_draws() -> None:
    """A change here is another stream: raise streams.GPU_STREAM."""
    drawn = {
        statistic: [
            sampler(cell).run_block(cell, block, 400, Streams(cell.digest, block)).total
            for cell in [Cell(statistic, Point("gaussian", 100, kappa=10.0, rho=rho), "direct", 5, "cuda")]
            for block in (0, 3)
        ]
        for statistic, rho in (("survivors", 0.0), ("consensus", 0.4))
    }
    assert drawn == {"survivors": [590.0, 665.0], "consensus": [77.0, 84.0]}
    sizes = [sampler(c).block_trials(c) for n in (1, 2**16, 2**17, 2**30, 2**31 - 1) for c in [_cell(n)]]
    assert sizes == [2**20, 2**20, 2**19, 128, 128]


def _cell(length: int, statistic: str = "survivors") -> Cell:
    return Cell(statistic, Point("gaussian", length), "direct", 0, "cuda")  # type: ignore[arg-type]  # one of two words


def test_a_block_begins_with_the_same_draws() -> None:
    cell = _cell(50)
    totals = [sampler(cell).run_block(cell, 1, trials, Streams(cell.digest, 1)).total for trials in (300, 301, 900)]
    assert totals == sorted(totals)
    assert totals[0] < totals[2]


def test_streams_are_apart() -> None:
    """Another device, block or seed draws other numbers."""
    cell = _cell(50)
    assert cell.digest != Cell("survivors", cell.point, "direct", 0).digest
    assert len({device.block_seed(cell.digest, block) for block in range(10_000)}) == 10_000
    assert all(0 <= device.block_seed(cell.digest, block) < 2**63 for block in range(1000))


def test_same_bits_on_any_executor_and_the_gpu_stays_in_this_process(rows: pd.DataFrame) -> None:
    class Watched(ThreadPoolExecutor):
        def submit(self, call, task):  # type: ignore[override]  # the engine's call alone
            submitted.append(task)
            return super().submit(call, task)

    submitted: list = []
    with Watched(2) as threads:
        both = theory_lab.check(["tda-4.3", "tda-4.6"], **{**GRID, "noise": ["gaussian", "laplace"]}, executor=threads)
    assert {task.cell.point.noise for task in submitted} == {"laplace"}
    assert set(both[both.noise == "laplace"].device) == {"cpu"}
    here = both[both.noise == "gaussian"].reset_index(drop=True)
    drawn = ["claim", "length", "trials", "estimate", "standard_error", "device"]
    pd.testing.assert_frame_equal(here[drawn], rows[drawn], check_exact=True)


def test_results_folder_extends_and_resumes(
    rows: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims, out = ["tda-4.3", "tda-4.6"], tmp_path / "out"
    theory_lab.check(claims, **{**GRID, "trials": 400}, out=out)
    longer = theory_lab.check(claims, **GRID, out=out, resume=True)
    pd.testing.assert_frame_equal(longer[RESULTS], rows[RESULTS], check_exact=True)
    monkeypatch.setattr(device.OnGpu, "run_block", _refuse)  # all is there
    monkeypatch.setattr("theory_lab.experiments.require_gpu", lambda: None)
    again = theory_lab.check(claims, **GRID, out=out, resume=True)
    pd.testing.assert_frame_equal(again[RESULTS], rows[RESULTS], check_exact=True)


def _refuse(*_: object, **__: object) -> BlockSum:
    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore lines")


def test_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("theory_lab.runner.default_trials", lambda cell: 1 << 12)  # the first look is at 2^8 trials
    settings = Settings(
        ("tda-4.3",), ("gaussian",), (2, 100), device="cuda", budget=Budget(trials=5000), bound_scale=0.24
    )
    found = run(settings)
    assert found.trials.sum() == 5000  # n = 2 attains 99.6% of this bound, and is looked at again and again
    assert (found.verdict == "HOLDS").tolist() == [False, True]
    assert set(found.method) == {"beta-mixture"}
    assert ((found.ci_low <= found.exact) & (found.exact <= found.ci_high)).all()
    pd.testing.assert_frame_equal(found[RESULTS], run(settings)[RESULTS], check_exact=True)


def test_a_gpu_that_fails_is_one_line_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("theory_kernels.exceedance_counts", _refuse)
    monkeypatch.setattr("theory_lab.experiments.require_gpu", lambda: None)
    partial: list[pd.DataFrame] = []
    settings = Settings(("tda-4.3",), ("laplace", "gaussian"), (2,), trials=500, device="cuda")
    with pytest.raises(DeviceError, match=r"^device: cuda; the GPU failed: CUDA out of memory\. Tried.*GiB\.$"):
        run(settings, workers=1, on_partial=partial.append)
    assert list(partial[0].noise) == ["laplace"]


def test_resolution_widens_the_interval_upwards() -> None:
    exact, coarse = (
        interval(Sample("bernoulli", 1, 1000, 3.0, 3.0, scale=10.0, resolution=r), 1e-3) for r in (0.0, 1e-4)
    )
    assert coarse.low == exact.low
    assert coarse.high == pytest.approx(exact.high + 10.0 * 1e-4, rel=1e-12)
    full = Sample("bernoulli", 1, 3, 3.0, 3.0, resolution=0.5)
    assert interval(full, 1e-3).high == 1.0


def test_auto_draws_on_the_gpu_what_it_will_meet() -> None:
    assert suits_gpu("survivors", Point("gaussian", 2**30))
    assert not suits_gpu("consensus", Point("gaussian", 2**30))
    assert not suits_gpu("survivors", Point("rademacher", 100))
    for length in (1, 2**10, 2**30):
        cell = _cell(length)
        assert default_trials(cell) * sampler(cell).seconds_per_trial(cell) <= 1.0
    cases = build_cases(Settings(noise=("gaussian",), device="cuda"))
    assert {(c.estimator, c.device) for c in cases} == {("direct", "cuda"), ("importance", "cpu")}
    assert {c.device for c in build_cases(Settings(noise=("gaussian",)))} == {"cpu"}


def test_what_stays_on_the_cpu_is_said() -> None:
    settings = Settings(
        noise=("gaussian", "laplace", "student-t(1.5)", "any"), length=(2, 2**40), key_rho=(0.0, 0.2), device="cuda"
    )
    cases, pieces = build_cases(settings), build_pieces(settings)[0]
    (line,) = device_notes(settings, cases, pieces)
    assert line.startswith("on the GPU: 2 of 28 cases; on the CPU as usual: ")
    for reason in ("other noise: 12", "no variance: 8", "key-rho above 0: 4", "longer than 2^31 - 1 keys: 2"):
        assert reason in line
    assert device_notes(Settings(noise=("gaussian",)), cases, pieces) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "gpu"}, "device: gpu; cpu or cuda is allowed"),
        ({"device": "cuda", "estimator": "tail"}, "estimator: tail; with the device cuda, auto or direct is allowed"),
        ({"device": "cuda", "claims": ("tda-4.3", "eta-floor")}, "device: cuda; eta-floor runs on the cpu alone"),
        ({"device": "cuda", "noise": ("laplace",)}, "device: cuda; it draws gaussian, uniform, rademacher and student"),
    ],
)
def test_refusals(settings: dict, message: str) -> None:
    with pytest.raises(InputError) as caught:
        prepare(Settings(**settings))
    assert str(caught.value).startswith(message)


def test_no_gpu_is_one_line_and_writes_nothing(cli, tmp_path: Path) -> None:
    done = cli("check", "tda-4.3", "--noise", "gaussian", "--device", "cuda", "--out", "out", "--plot", "p.png",
               env={"CUDA_VISIBLE_DEVICES": ""})  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == "theory-lab: error: device: cuda; torch finds no CUDA device on this machine; cpu is allowed\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("statistic", ["survivors", "consensus"])
def test_a_gpu_draws_the_reference(statistic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = _cell(3000, statistic)
    device.require_gpu()
    drawn = sampler(cell).run_block(cell, 2, 700, Streams(cell.digest, 2))
    monkeypatch.setattr(device, "target", "cpu")
    assert drawn == sampler(cell).run_block(cell, 2, 700, Streams(cell.digest, 2))
