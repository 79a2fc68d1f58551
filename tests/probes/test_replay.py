"""Recording what a probe computes of one layer, and replaying it for others."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from probe_cases import WORDS, tiny_llama  # noqa: E402
from tiny_models import build  # noqa: E402

from theory_lab.probes import probe, replay  # noqa: E402

MECHANISMS = ["model", "tra", "tda:views=neighbors", "eta:tau=0.5"]


def _loaded(architecture: str) -> Any:
    loaded = tiny_llama()
    if architecture != "llama":
        loaded.model = build(architecture)
        config = loaded.model.config
        loaded.backbone, loaded.layers = loaded.model.base_model, config.num_hidden_layers
        loaded.heads, loaded.key_heads = config.num_attention_heads, config.num_key_value_heads
    return loaded


@pytest.mark.parametrize(
    ("architecture", "mechanism"),
    [*(("llama", mechanism) for mechanism in MECHANISMS), ("gemma2", "model"), ("gpt-oss", "model")],
)
def test_calls_of_a_kind_differ_in_their_tensors_alone(
    architecture: str, mechanism: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call goes to the function of the first one of its kind, as a recording does it.

    Gemma-2's windows make kinds of their own, gpt-oss's learned sinks are tensors.
    """
    loaded = _loaded(architecture)
    settings: dict[str, Any] = {"text": WORDS, "lengths": (9, 23), "as_": mechanism, "windows": 2}
    want = probe(loaded, **settings).rows
    first: dict[Any, Any] = {}

    def borrowed(self: Any, function: Any, tensors: Any, kind: Any) -> Any:
        return first.setdefault((kind, *(x.shape for x in tensors)), function)(*tensors)

    monkeypatch.setattr(replay.Replays, "__call__", borrowed)
    pd.testing.assert_frame_equal(probe(loaded, **settings).rows, want)
    assert len(first) == (2 if architecture in ("gemma2", "gpt-oss") else 1)


class _Graph:
    """Stands for a CUDA graph: runs what it was told to, on where it reads and writes."""

    def __init__(self, work: Any) -> None:
        self.replay = work


@pytest.mark.parametrize("fault", [0.0, 1e-300])
def test_a_recording_that_gives_other_bits_is_not_used(fault: float, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Cuda(torch.Tensor):
        device = torch.device("cuda")

    def function(x: Any) -> tuple[Any, str]:
        calls.append(1)
        return torch.Tensor.as_subclass(torch.where(x > 1, torch.nan, x * 2), torch.Tensor), "rest"

    def record(function: Any, tensors: Any) -> Any:
        own, output = torch.zeros(1, 1, 2, dtype=torch.float64), torch.zeros(1, 1, 2, dtype=torch.float64)
        return replay._Recording(_Graph(lambda: output.copy_(function(own)[0] + fault)), [own], output, "rest", ())

    monkeypatch.setattr(replay, "_record", record)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    replays: Any = replay.Replays()
    for number in (0.0, 1e-300, 3.0):
        x = torch.tensor([[[number, number + 1e-300]]], dtype=torch.float64).as_subclass(Cuda)
        found, rest = replays(function, [x], "kind")
        assert rest == "rest"
        assert replay.same_bits(found, function(x)[0])
    (kept,) = replays._recordings.values()
    assert (kept is None) == (fault != 0.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mechanism", [*MECHANISMS, "entmax:alpha=1.5"])
def test_replayed_layers_have_the_same_bits(mechanism: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from theory_kernels import geometry

    loaded = tiny_llama(num_hidden_layers=5)
    loaded.layers = 5
    loaded.model.to("cuda", getattr(torch, dtype))
    recorded = []
    record = replay._record
    monkeypatch.setattr(replay, "_record", lambda *given: recorded.append(record(*given)) or recorded[-1])
    settings: dict[str, Any] = {"text": WORDS * 3, "lengths": (65, 170), "as_": mechanism, "windows": 2}
    found = probe(loaded, **settings).rows
    assert len(recorded) == 1
    assert recorded[0] is not None, "it could not be recorded"
    # Tables that were remembered may go while a recording reads them.
    geometry._TABLES.clear()
    monkeypatch.setattr(replay, "MOST_ROWS", 0)
    pd.testing.assert_frame_equal(probe(loaded, **settings).rows, found, check_exact=True)
    assert len(recorded) == 1
