"""The training step, in two forms with the same numbers: eager, on any device and any number of processes, and captured
whole in a CUDA graph, which takes the launch overhead away that small models spend most of their time on."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from theory_lab.errors import DeviceError, TheoryLabError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn
    from torch.optim import Optimizer

    from theory_lab.training.feed import Segment
    from theory_lab.training.settings import TrainSettings


class Numbers(NamedTuple):
    """Loss (nats a token) and gradient norm before clipping, of each update of a segment."""

    losses: npt.NDArray[np.float64]
    norms: npt.NDArray[np.float64]


class NotFinite(TheoryLabError):
    """A loss or gradient that is no number: training cannot go on.

    Parameters
    ----------
    message : str
    before : Numbers
        The updates of the segment that were fine.
    step : int or None
        The update that was not, from 1, where the layer is not known.
    """

    def __init__(self, message: str, before: Numbers, step: int | None = None) -> None:
        super().__init__(message)
        self.before = before
        self.step = step

    def __reduce__(self) -> tuple[type[NotFinite], tuple[str, Numbers, int | None]]:
        return type(self), (str(self), self.before, self.step)


class Stepper(Protocol):
    """Does the updates of a segment."""

    #: Largest number of updates of a segment.
    most: int

    def run(self, segment: Segment) -> Numbers:
        """Do the updates; NotFinite if a loss or gradient is none."""


def autocast(device: torch.device, dtype: str) -> contextlib.AbstractContextManager[Any]:
    """Matrix products in bfloat16, or everything as it is."""
    if dtype == "float32":
        return contextlib.nullcontext()
    # No cache: a captured graph must cast the weights anew at each replay.
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)


@contextlib.contextmanager
def precision(device: torch.device, dtype: str) -> Iterator[None]:
    """Under bfloat16 the matrix products that stay in float32 may use tf32; under float32 nothing may."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if dtype == "bfloat16" else "highest")
    try:
        with warnings.catch_warnings():
            # The compiler's advice to use tf32, which float32 here means to do without.
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores", category=UserWarning)
            yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def fastest_softmax(device: torch.device) -> Iterator[None]:
    """On GPUs from Hopper on, prefer cuDNN's attention, whose forward and backward are faster than FlashAttention-2's.

    A choice that the caller made with :func:`torch.nn.attention.sdpa_kernel` stays.
    """
    chosen = not (
        torch.backends.cuda.flash_sdp_enabled()
        and torch.backends.cuda.cudnn_sdp_enabled()
        and torch.backends.cuda.mem_efficient_sdp_enabled()
        and torch.backends.cuda.math_sdp_enabled()
    )
    if device.type != "cuda" or chosen or torch.cuda.get_device_capability(device) < (9, 0):
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        yield


def make_optimizer(model: Any, settings: TrainSettings, device: torch.device, capturable: bool) -> Optimizer:
    """AdamW over the model's parameter groups; its learning rate is a tensor where a graph has to write it."""
    rate: Any = torch.tensor(settings.lr, device=device) if capturable else settings.lr
    return torch.optim.AdamW(
        model.parameter_groups(settings.weight_decay),
        lr=rate,
        betas=settings.betas,
        eps=settings.adam_eps,
        weight_decay=settings.weight_decay,
        fused=True,
        capturable=capturable,
    )


def clip(model: nn.Module, largest: float) -> Tensor:
    """Scale the gradient down to a norm of at most `largest`; its norm before that."""
    return torch.nn.utils.clip_grad_norm_(model.parameters(), largest, error_if_nonfinite=False)


class Eager:
    """One update after the other, on one or several processes.

    The loss of a step is the mean over all its scored tokens, wherever they are: each part's mean counts by its share.
    """

    most = 1

    def __init__(
        self, model: Any, wrapped: nn.Module, optimizer: Optimizer, settings: TrainSettings, accelerator: Accelerator
    ) -> None:
        self._model, self._wrapped, self._optimizer = model, wrapped, optimizer
        self._settings, self._accelerator = settings, accelerator
        self._device = accelerator.device

    def run(self, segment: Segment) -> Numbers:
        """Do the updates; NotFinite, before the update, if a loss or gradient is none."""
        losses, norms = [], []
        for index in range(segment.updates):
            loss, norm = self._update(segment, index)
            losses.append(loss)
            norms.append(norm)
        return Numbers(np.array(losses), np.array(norms))

    def _update(self, segment: Segment, index: int) -> tuple[float, float]:
        world = self._accelerator.num_processes
        # Whatever a mechanism draws is a function of seed, step and process, so that no generator has to be stored.
        torch.manual_seed(hash((self._settings.seed, segment.first + index, self._accelerator.process_index)))
        for group in self._optimizer.param_groups:
            group["lr"] = float(segment.rates[index])
        self._optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), dtype=torch.float32, device=self._device)
        parts = segment.tokens.shape[1]
        for part in range(parts):
            tokens = torch.from_numpy(segment.tokens[index, part]).to(self._device)
            labels = torch.from_numpy(segment.labels[index, part]).to(self._device)
            last = part == parts - 1
            with contextlib.nullcontext() if last else self._accelerator.no_sync(self._wrapped):
                with autocast(self._device, self._settings.dtype):
                    loss = self._wrapped(input_ids=tokens, labels=labels, use_cache=False).loss
                loss = loss.float() * float(segment.shares[index, part])
                # Gradients are averaged over the processes, and here is what they have to sum to.
                self._accelerator.backward(loss * world)
            total += loss.detach()
        if world > 1:
            total = self._accelerator.reduce(total, reduction="sum")
        norm = clip(self._model, self._settings.clip)
        value, size = float(total), float(norm)
        if not (np.isfinite(value) and np.isfinite(size)):
            raise NotFinite(self._where(segment, index, value, size), Numbers(np.zeros(0), np.zeros(0)))
        self._optimizer.step()
        return value, size

    def _where(self, segment: Segment, index: int, loss: float, norm: float) -> str:
        """Step, number, and the first layer or gradient that is none."""
        name = "loss" if not np.isfinite(loss) else "gradient norm"
        shown = loss if name == "loss" else norm
        place = ""
        if name == "loss":
            tokens = torch.from_numpy(segment.tokens[index, 0]).to(self._device)
            place = first_not_finite(self._model, tokens, self._settings.dtype)
        else:
            bad = [n for n, p in self._model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
            place = f", first in the gradient of {bad[0]}" if bad else ""
        return f"{name}: {shown} at step {segment.first + index + 1}{place}"


def first_not_finite(model: nn.Module, tokens: Tensor, dtype: str) -> str:
    """Where numbers end, in words: a parameter, or the first module whose output holds none."""
    bad = [name for name, parameter in model.named_parameters() if not parameter.isfinite().all()]
    if bad:
        return f", in the weights of {bad[0]}"
    met: list[str] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            if isinstance(first, Tensor) and first.is_floating_point() and not first.isfinite().all():
                met.append(name)

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad(), autocast(tokens.device, dtype):
            model(input_ids=tokens, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return f", first in the output of {met[0]}" if met else ""


class CannotCapture(TheoryLabError):
    """A step that a CUDA graph cannot hold; it can run without."""


@contextlib.contextmanager
def _as_if_captured(compiled: bool) -> Iterator[None]:
    """Make whatever waits for the device an error: found out here, it breaks no capture.

    Code that looks at values only outside of a capture is told that it is in one. A compiled model is not told: it
    would be compiled again.
    """
    before, asked = torch.cuda.get_sync_debug_mode(), torch.cuda.is_current_stream_capturing
    with warnings.catch_warnings():
        # PyTorch says once that the mode is a prototype and misses some waits: the capture itself finds those.
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype", category=UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    if not compiled:
        torch.cuda.is_current_stream_capturing = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = asked
        torch.cuda.set_sync_debug_mode(before)


class Captured:
    """The whole step, forward to update, as one CUDA graph that is replayed.

    Shapes are static; batches, learning rates and shares of a segment lie in buffers that the graph reads by a counter
    on the device, so that one replay is one call and the host never waits within a segment.

    Raises
    ------
    CannotCapture
        If the step waits for the device, which a graph cannot. Weights and moments are then what they were.
    DeviceError
        If the capture breaks in another way.
    """

    most = 32

    def __init__(self, model: Any, forward: Any, optimizer: Optimizer, settings: TrainSettings, first: Segment) -> None:
        self._model, self._forward, self._optimizer, self._settings = model, forward, optimizer, settings
        device = next(model.parameters()).device
        parts, sequences, length = first.tokens.shape[1:]
        self._tokens = torch.zeros((self.most, parts, sequences, length), dtype=torch.int64, device=device)
        self._labels = torch.zeros_like(self._tokens)
        self._shares = torch.zeros((self.most, parts), device=device)
        self._rates = torch.zeros(self.most, device=device)
        self._losses, self._norms = torch.zeros_like(self._rates), torch.zeros_like(self._rates)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        self._device = device
        self._load(first)
        self._capture()

    def _load(self, segment: Segment) -> None:
        pairs: list[tuple[Tensor, Any]] = [
            (self._tokens, segment.tokens),
            (self._labels, segment.labels),
            (self._shares, segment.shares),
            (self._rates, segment.rates.astype(np.float32)),
        ]
        for buffer, values in pairs:
            # Pinned memory is given back only when the copy out of it is done.
            host = torch.from_numpy(np.ascontiguousarray(values)).pin_memory()
            buffer[: segment.updates].copy_(host, non_blocking=True)
        self._at.zero_()

    def _step(self) -> None:
        tokens = self._tokens.index_select(0, self._at)[0]
        labels = self._labels.index_select(0, self._at)[0]
        shares = self._shares.index_select(0, self._at)[0]
        total = torch.zeros(1, device=self._device)
        for part in range(tokens.shape[0]):
            with autocast(self._device, self._settings.dtype):
                loss = self._forward(input_ids=tokens[part], labels=labels[part], use_cache=False).loss
            loss = loss.float() * shares[part]
            loss.backward()
            total = total + loss.detach()
        norm = clip(self._model, self._settings.clip)
        for group in self._optimizer.param_groups:
            group["lr"].copy_(self._rates.index_select(0, self._at)[0])
        self._optimizer.step()
        self._losses.index_copy_(0, self._at, total)
        self._norms.index_copy_(0, self._at, norm.float().reshape(1))
        self._at += 1

    def _capture(self) -> None:
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        weights = [p.detach().clone() for p in parameters]
        moments = {p: {k: v.clone() for k, v in s.items()} for p, s in self._optimizer.state.items()}

        def restore() -> None:
            with torch.no_grad():
                for parameter, value in zip(parameters, weights, strict=True):
                    parameter.copy_(value)
                for parameter, state in self._optimizer.state.items():
                    for name, value in state.items():
                        before = moments.get(parameter)
                        if before is None:
                            value.zero_()
                        else:
                            value.copy_(before[name])
            self._optimizer.zero_grad(set_to_none=True)
            self._at.zero_()

        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(side):
                # What a model settles and remembers at its first call is settled before a compiler looks at it.
                with torch.no_grad(), autocast(self._device, self._settings.dtype):
                    self._model(input_ids=self._tokens[0, 0, :1], use_cache=False)
                # Libraries choose their algorithms, and the compiler compiles, before anything is captured.
                for index in range(4):
                    self._optimizer.zero_grad(set_to_none=True)
                    with _as_if_captured(self._forward is not self._model) if index == 3 else contextlib.nullcontext():
                        self._step()
                    self._at.zero_()
        except RuntimeError as error:
            torch.cuda.current_stream(self._device).wait_stream(side)
            restore()
            if "synchronizing" not in str(error):
                raise
            raise CannotCapture("it waits for the device") from error
        torch.cuda.current_stream(self._device).wait_stream(side)
        torch.cuda.synchronize(self._device)
        restore()
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self._device)
        try:
            # Without gradients before it, the captured backward writes them instead of adding to them.
            with torch.cuda.graph(self._graph):
                self._step()
        except RuntimeError as error:
            # What a broken capture leaves of allocator and streams cannot be trusted: nothing goes on from here.
            torch.cuda.set_stream(stream)
            raise DeviceError(
                f"the step cannot be captured in a CUDA graph ({str(error).splitlines()[0]}); it runs with --no-graph"
            ) from error
        self._at.zero_()

    def run(self, segment: Segment) -> Numbers:
        """Replay the step; NotFinite, after the segment, if a loss or gradient was none."""
        self._load(segment)
        for _ in range(segment.updates):
            self._graph.replay()
        both = torch.stack([self._losses, self._norms])[:, : segment.updates].double().cpu().numpy()
        fine = np.isfinite(both).all(0)
        if not fine.all():
            bad = int(np.argmin(fine))
            name, value = ("loss", both[0, bad]) if not np.isfinite(both[0, bad]) else ("gradient norm", both[1, bad])
            step = segment.first + bad + 1
            raise NotFinite(f"{name}: {value} at step {step}", Numbers(*both[:, :bad]), step)
        return Numbers(both[0], both[1])
