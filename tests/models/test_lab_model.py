"""The language model: what every mechanism shares, cache, padding, saving, training."""

from __future__ import annotations

import copy
import json

import pytest

from theory_lab import InputError

torch = pytest.importorskip("torch")
tf = pytest.importorskip("transformers")

from theory_lab.attention.base import Mechanism  # noqa: E402
from theory_lab.models.lab import LabForCausalLM, attention_state, language_mechanisms, make_config  # noqa: E402
from theory_lab.models.lab.attention import LabAttention, dense  # noqa: E402
from theory_lab.models.lab.state import observed  # noqa: E402

VOCABULARY = 40
#: One of each kind of arithmetic, for what costs more.
KINDS = ["softmax", "tda", "asentmax", "eta-weight", "tra-sharp", "diff-softmax"]


def make(attention: str, **more) -> LabForCausalLM:
    torch.manual_seed(0)
    parameters = {"beta": 0.3} if attention[:3] in ("tra", "tda") else {}
    settings = {"hidden_size": 48, "num_attention_heads": 4, "head_dim": 12, "intermediate_size": 40}
    config = make_config(
        "recall", attention, vocab_size=VOCABULARY, attention_parameters=parameters,
        **{**settings, "num_key_value_heads": 2, **more},
    )  # fmt: skip
    return LabForCausalLM(config)


def tokens(batch: int = 2, length: int = 17) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(batch * length))


def cache_of(output):
    return getattr(output, "cache", None) or getattr(output, "past_key_values", None)


def budget(model, ids, found) -> float:
    """Twice the error of one float32 run against float64, and a band of rounding a layer."""
    wide = copy.deepcopy(model).double()
    with torch.no_grad():
        exact = wide(ids).logits
    error = (found.double() - exact).abs().max()
    layers = model.config.num_hidden_layers
    return float(2 * (error + 16 * layers * torch.finfo(torch.float32).eps * exact.abs().max()))


@pytest.mark.parametrize("name", language_mechanisms())
def test_every_mechanism_trains(name):
    model = make(name).train()
    ids = tokens()
    output = model(ids, labels=ids)
    assert cache_of(output) is None
    output.loss.backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert torch.isfinite(parameter.grad).all(), parameter_name
    wanted = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert torch.allclose(output.loss, wanted)
    first, second = model.parameter_groups(0.1)
    own = [p for m in model.modules() if isinstance(m, Mechanism) for p in m.parameters()]
    assert {id(p) for p in first["params"]}.isdisjoint({id(p) for p in own})
    assert {id(p) for p in first["params"] + second["params"]} == {id(p) for p in model.parameters()}
    assert (first["weight_decay"], second["weight_decay"]) == (0.1, 0.0)
    assert all(p.ndim == 2 for p in first["params"])


@pytest.mark.parametrize("name", language_mechanisms())
def test_layers_compute_the_mechanism(name):
    """What the first layer computes is what the mechanism itself makes of the same tensors."""
    model = make(name).double().eval()
    seen = []
    with torch.no_grad(), observed(model, lambda *call: seen.append(call)):
        model(tokens())
        module, q, k, views, x = seen[0]
        v = torch.randn(*k.shape[:3], 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        if name in ("dex",):
            v = torch.randn(*k.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        second = {"q2": views[0][0], "k2": views[0][1]} if views else {}
        wanted = module.mechanism.double()(q, k, v, x=x, **second)
        output, weights = dense(module.mechanism, q, k, v, views=views, x=x)
    size = wanted.weights.abs().sum(-1, keepdim=True).clamp_min(1.0) * v.abs().max()
    assert ((weights - wanted.weights).abs() <= 256 * torch.finfo(torch.float64).eps).all()
    assert ((output - wanted.output).abs() <= 1024 * torch.finfo(torch.float64).eps * size).all()


@pytest.mark.parametrize("name", language_mechanisms())
def test_a_cache_changes_nothing(name):
    if name in ("h2o", "landmark"):
        pytest.skip("what it keeps or groups depends on which queries come together")
    model = make(name).eval()
    ids = tokens()
    with torch.no_grad():
        whole = model(ids).logits
        first = model(ids[:, :6], use_cache=True)
        cache = cache_of(first)
        # Several new queries at once, then one by one.
        parts = [first.logits, model(ids[:, 6:11], past_key_values=cache, use_cache=True).logits]
        parts += [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(11, ids.shape[1])]
    assert (torch.cat(parts, 1) - whole).abs().max() <= budget(model, ids, whole)


@pytest.mark.parametrize("positions", ["rope", "nope"])
@pytest.mark.parametrize("name", KINDS)
def test_padding_on_either_side_changes_nothing(name, positions):
    model = make(name, positions=positions).eval()
    ids = tokens()
    pad = torch.full((2, 4), model.config.pad_token_id)
    hidden, shown = torch.zeros(2, 4), torch.ones(2, ids.shape[1])
    with torch.no_grad():
        whole = model(ids).logits
        left = model(torch.cat([pad, ids], 1), attention_mask=torch.cat([hidden, shown], 1)).logits[:, 4:]
        right = model(torch.cat([ids, pad], 1), attention_mask=torch.cat([shown, hidden], 1)).logits[:, :-4]
        allowed = budget(model, ids, whole)
    assert (left - whole).abs().max() <= allowed
    assert (right - whole).abs().max() <= allowed


def test_padded_rows_give_no_gradient_that_is_no_number():
    for name in KINDS:
        model = make(name).train()
        ids = tokens()
        mask = torch.ones_like(ids)
        mask[0, :5] = 0
        labels = ids.masked_fill(mask == 0, -100)
        model(ids, attention_mask=mask, labels=labels).loss.backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters()), name


@pytest.mark.parametrize("name", ["softmax", "tda"])
def test_generate_with_and_without_a_cache_and_padding(name):
    model = make(name).eval()
    ids = tokens(2, 7)
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=False, **options)[:, 7:]
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, 7:]
    pad = torch.full((2, 3), model.config.pad_token_id)
    mask = torch.cat([torch.zeros_like(pad), torch.ones_like(ids)], 1)
    padded = model.generate(torch.cat([pad, ids], 1), attention_mask=mask, **options)[:, 10:]
    assert torch.equal(found, wanted)
    assert torch.equal(padded, wanted)


def test_saved_and_loaded_it_is_the_same(tmp_path):
    from theory_lab.models import load_model

    model = make("tda", positions="rope", rope_ntk_factor=2.0).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)  # nothing that a loader could have drawn anew
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "theory_lab"
    again = tf.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(again) is LabForCausalLM
    ids = tokens()
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    assert type(tf.AutoModel.from_pretrained(tmp_path)).__name__ == "LabModel"
    narrow = tf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kinds = {name: p.dtype for name, p in narrow.named_parameters()}
    assert {kind for name, kind in kinds.items() if "mechanism" in name} == {torch.float32}
    assert {kind for name, kind in kinds.items() if "mechanism" not in name} == {torch.bfloat16}
    loaded = load_model(tmp_path)
    assert (loaded.layers, loaded.heads, loaded.key_heads, loaded.head_dim, loaded.causal) == (2, 4, 2, 12, True)


@pytest.mark.parametrize("name", ["softmax", "tda"])
def test_checkpointing_gives_the_same_gradients(name):
    model = make(name).train()
    ids = tokens()
    model(ids, labels=ids).loss.backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    model(ids, labels=ids, use_cache=True).loss.backward()
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("name", [*KINDS, "sparsemax", "lssa"])
def test_a_training_step_asks_no_tensor_for_its_value(name):
    """Under fake tensors, reading a value (which a CUDA graph cannot) is an error."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = make(name, num_hidden_layers=1).train()
    ids = tokens()
    model(ids, labels=ids)  # tables are made on the first call
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {key: mode.from_tensor(value) for key, value in model.state_dict(keep_vars=True).items()}
        loss = torch.func.functional_call(model, fake, (mode.from_tensor(ids),), {"labels": mode.from_tensor(ids)}).loss
        torch.autograd.grad(loss, [value for value in fake.values() if value.requires_grad], allow_unused=True)


def test_torch_compile_takes_the_model_as_one_graph():
    torch._dynamo.reset()
    model = make("tda-sharp", num_hidden_layers=1).train()
    ids = tokens()
    wanted = model(ids, labels=ids).loss
    found = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)(ids, labels=ids).loss
    assert torch.equal(found, wanted)


def test_attention_can_be_returned_and_hidden_states():
    model = make("tda").eval()
    ids = tokens()
    with torch.no_grad():
        found = model(ids, output_attentions=True, output_hidden_states=True)
    assert [tuple(a.shape) for a in found.attentions] == [(2, 4, 17, 17)] * 2
    assert (found.attentions[0] < 0).any()
    assert len(found.hidden_states) == 3


def test_the_state_of_attention_is_that_of_its_maps():
    model = make("tda").eval()
    ids = tokens(2, 24)
    state = attention_state(model, ids, queries=12)
    with torch.no_grad():
        maps = model(ids, output_attentions=True).attentions
    for layer, (numbers, weights) in enumerate(zip(state, maps, strict=True)):
        rows = weights[:, :, 12:]
        visible = sum(range(13, 25)) * 2 * 4
        assert numbers["layer"] == layer
        assert numbers["zeros"] == pytest.approx(1 - float((rows != 0).sum()) / visible)
        assert numbers["dead_rows"] == pytest.approx(float((rows == 0).all(-1).float().mean()))
        assert numbers["survivors"] == pytest.approx(float((rows != 0).sum(-1).float().mean()))
        assert numbers["beta"] == pytest.approx(0.3)
        assert -1 <= numbers["correlation"] <= 1
    assert not any(module.observer for module in model.modules() if isinstance(module, LabAttention))


def test_nape_models_forget_where_nothing_is_near():
    """In heads without a slope, swapping earlier keys changes nothing; in heads with one, it does."""
    model = make("softmax", positions="nape", num_hidden_layers=1).eval()
    ids = tokens(1, 9)
    swapped = ids[:, [1, 0, *range(2, 9)]]
    with torch.no_grad():
        first, second = (model(one, output_attentions=True).attentions[0][0, :, -1] for one in (ids, swapped))
    # The softmax's denominator holds the same terms in another order where no distance enters.
    assert torch.allclose(first[:2, :2], second[:2, :2].flip(-1), rtol=8 * torch.finfo(torch.float32).eps)
    assert not torch.allclose(first[2:, :2], second[2:, :2].flip(-1), rtol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [({}, "input_ids"), ({"input_ids": tokens(), "attention_mask": torch.ones(2, 3)}, "attention_mask")],
)
def test_bad_calls_are_named(arguments, field):
    with pytest.raises(InputError) as error:
        make("softmax")(**arguments)
    assert error.value.field == field
    with pytest.raises(InputError, match="weight_decay"):
        make("softmax").parameter_groups(-1.0)
