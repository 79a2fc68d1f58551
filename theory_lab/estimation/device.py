"""``direct`` on a GPU: every score of every row is drawn inside a kernel, and only the counts come back.

The kernel is :func:`theory_kernels.exceedance_counts`. It compares the inverse transform of a counter-based uniform
with tau: 16 bits decide, 32 more settle a tie, so that the probability of an event is rounded down to a multiple of
2^-48; the interval's upper end is raised by as much. Two views share a uniform whose nested levels are the
probabilities of both, one and either exceeding.

Block b of a cell draws with the Philox key ``seed(digest, b)``, and trial t of the block with counter word t: the same
recipe on every device, of which the CPU's is the reference. Change it, or the block sizes, and
``streams.GPU_STREAM`` must change too. torch is imported by the first draw, not before.
"""

from __future__ import annotations

import hashlib
import importlib.util
import warnings
from typing import TYPE_CHECKING

from theory_lab.claims.base import Point
from theory_lab.errors import DeviceError, InputError
from theory_lab.estimation.base import BlockSum, Cell, Estimator, Shape
from theory_lab.noise import ANY_LAW
from theory_lab.noise.continuous import Gaussian, StudentT, Uniform
from theory_lab.noise.discrete import Rademacher
from theory_lab.streams import Streams

if TYPE_CHECKING:
    from theory_kernels import Noise

DEVICES = ("cpu", "cuda")

#: The laws that the kernel knows, in words.
LAWS = "gaussian, uniform, rademacher and student-t"

#: Where the kernel runs; its stream is the same everywhere, so the tests draw it on the CPU.
target = "cuda"

_KERNEL_NAMES = {Gaussian: "gaussian", Uniform: "uniform", Rademacher: "rademacher", StudentT: "student-t"}
_MOST_KEYS = (1 << 31) - 1
_RESOLUTION = 2.0**-48
_BLOCK_DRAWS = 1 << 36
# A program of the kernel draws this many trials side by side: fewer cost as much.
_LEAST_ROWS = 1 << 7
_MOST_ROWS = 1 << 20


def obstacle(point: Point) -> str | None:
    """Why the kernel cannot draw the rows of a point, in a few words; None if it can."""
    if point.noise == ANY_LAW or type(point.family) not in _KERNEL_NAMES:
        return "other noise"
    if isinstance(point.family, StudentT) and not point.family.nu > 2:
        return "no variance"
    if point.key_rho:
        return "key-rho above 0"
    return "longer than 2^31 - 1 keys" if point.length > _MOST_KEYS else None


def require_gpu() -> None:
    """Make sure that the kernel runs, and compile it.

    Raises
    ------
    InputError
        If torch, triton or a GPU is missing.
    DeviceError
        If the GPU does not run the kernel.
    """
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            raise InputError("device", "cuda", f"it needs {package}: pip install 'theory-lab[triton]'")
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about drivers; what matters is said below
        found = target != "cuda" or torch.cuda.is_available()
    if not found:
        raise InputError("device", "cuda", "torch finds no CUDA device on this machine; cpu is allowed")
    for statistic in ("survivors", "consensus"):
        ON_GPU.run_block(Cell(statistic, Point(length=1), "direct", 0, "cuda"), 0, 1, Streams("0" * 32, 0))


def _noise(cell: Cell) -> Noise:
    from theory_kernels import Noise

    point = cell.point
    family = point.family
    # The proxy is the variance for all four laws (that of student-t, which has no proxy, is scaled to it).
    return Noise(
        _KERNEL_NAMES[type(family)],
        point.proxy,
        family.nu if isinstance(family, StudentT) else 5.0,
        None if cell.statistic == "survivors" else point.rho,
    )


def block_seed(digest: str, block: int) -> int:
    """Philox key of a block: 63 bits of a hash of the cell's name and the block's index."""
    name = hashlib.blake2b(f"{digest}/{block}".encode(), digest_size=8).digest()
    return int.from_bytes(name, "little") >> 1


class OnGpu(Estimator):
    """Draw every score of every row on a GPU, and count."""

    name = "direct"

    def block_trials(self, cell: Cell) -> int:
        return min(_MOST_ROWS, max(_LEAST_ROWS, 1 << (_BLOCK_DRAWS // cell.point.length).bit_length() - 1))

    def seconds_per_trial(self, cell: Cell) -> float:
        """Rough cost on an H200, measured; a block of short rows is mostly launches."""
        per_score, per_row = (7.2e-13, 4e-10) if cell.statistic == "survivors" else (1.05e-12, 1e-9)
        return per_score * cell.point.length + per_row

    def shape(self, cell: Cell) -> Shape:
        n = cell.point.length
        return Shape("bernoulli", "every score drawn, GPU", float(n), resolution=_RESOLUTION, per_trial=n)

    def certain(self, cell: Cell) -> bool:
        return False

    def run_block(self, cell: Cell, block: int, trials: int, streams: Streams) -> BlockSum:
        import torch
        from theory_kernels import exceedance_counts

        try:
            counts = exceedance_counts(
                _noise(cell), cell.point.tau, cell.point.length, trials, block_seed(cell.digest, block), device=target
            )
            wanted = counts.first if cell.statistic == "survivors" else counts.both
            assert wanted is not None
            hits = float(int(wanted.sum(dtype=torch.int64)))
        except RuntimeError as error:  # out of memory, a driver's complaint, a device that is gone
            raise DeviceError(f"device: cuda; the GPU failed: {str(error).strip().splitlines()[0]}") from error
        return BlockSum(block, trials, hits, hits)


ON_GPU = OnGpu()
