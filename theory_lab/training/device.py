"""Where a run works: device, processes, and memory that runs out in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from theory_lab.errors import DeviceError, InputError

if TYPE_CHECKING:
    from accelerate import Accelerator

    from theory_lab.training.settings import TrainSettings

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


def prepare(settings: TrainSettings) -> tuple[Accelerator, TrainSettings]:
    """The processes of a run, and settings with device and dtype decided.

    Raises
    ------
    InputError
        For a device that there is not.
    """
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    device = settings.device
    if not _DEVICE.fullmatch(device):
        raise InputError("device", device, "auto, cpu, cuda or cuda:N is allowed")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise InputError("device", device, "no GPU is visible to PyTorch here; cpu is allowed")
        if ":" in device:
            if world > 1:
                raise InputError("device", device, "cuda is allowed under torchrun, which gives each process its own")
            index = int(device.split(":")[1])
            if index >= torch.cuda.device_count():
                raise InputError("device", device, f"{torch.cuda.device_count()} such devices are here, counted from 0")
            torch.cuda.set_device(index)
    if PartialState._shared_state and (world == 1 or PartialState().num_processes != world):
        # accelerate keeps the first choice of a process for ever; another run of it may choose another device.
        AcceleratorState._reset_state(reset_partial_state=True)
    # Mixed precision is ours: accelerate's copies the logits to float32 on their way out.
    accelerator = Accelerator(cpu=device == "cpu", mixed_precision="no")
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "float32" if accelerator.device.type == "cpu" else "bfloat16"
    return accelerator, dataclasses.replace(settings, device=device, dtype=dtype)


def leave() -> None:
    """Leave the group of processes that train together; NCCL complains of a process that ends within it."""
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def memory(doing: str) -> Iterator[None]:
    """Turn running out of memory into a DeviceError that says what to change."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _full(doing) from error
    except RuntimeError as error:
        if "can't allocate memory" in str(error):
            raise _full(doing) from error
        if of_the_compiler(error):
            why = " ".join(str(error).split())[:200]
            raise DeviceError(f"torch.compile failed {doing} ({why}); it runs without --compile") from error
        raise


def of_the_compiler(error: Exception) -> bool:
    """Whether torch.compile raised it while it compiled."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


def _full(doing: str) -> DeviceError:
    return DeviceError(f"out of memory {doing}: a smaller batch, a larger accumulation or a smaller size helps")


def describe(accelerator: Accelerator) -> str:
    """The device's name, as a record keeps it."""
    import torch

    if accelerator.device.type == "cuda":
        return torch.cuda.get_device_name(accelerator.device)
    return f"cpu, {torch.get_num_threads()} threads"
