"""What a watch leaves behind, and what it says of layers that it cannot see."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
tf = pytest.importorskip("transformers", reason="needs transformers")

from test_watching import same_bits  # noqa: E402  # after the skips
from tiny_models import VOCABULARY, build, texts  # noqa: E402

from theory_lab import InputError  # noqa: E402
from theory_lab.probes import watch  # noqa: E402
from theory_lab.probes.watching import _renamed, _watches, find_attention, spans  # noqa: E402


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    assert not _watches
    assert not _renamed


def ignore(call) -> None:
    """An observer that looks away."""


def test_watches_nest_and_overlap() -> None:
    model, inputs = build("llama", "sdpa"), texts()
    counts = {"outer": 0, "inner": 0}

    def counter(name):
        def observe(call) -> None:
            counts[name] += 1

        return observe

    with torch.no_grad():
        plain = model(**inputs).logits
        with watch(model, counter("outer")) as outer:
            model(**inputs)
            with watch(model, counter("inner"), layers=[1]) as inner:
                watched = model(**inputs).logits
            model(**inputs)
        assert model.config._attn_implementation == "sdpa"
        assert type(model.config._attn_implementation) is str
        first = watch(model, counter("outer"))
        second = watch(model, counter("inner"))
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)  # the other way round than a with statement does
        model(**inputs)
        second.__exit__(None, None, None)
    assert same_bits(plain, watched)
    assert outer.seen == {0: 3, 1: 3}
    assert inner.seen == {1: 1}
    assert counts == {"outer": 6, "inner": 3}


@pytest.mark.parametrize("where", ["observer", "model"])
def test_an_error_restores_the_model(where: str) -> None:
    model, inputs = build("llama", "sdpa"), texts()

    def observe(call) -> None:
        if where == "observer":
            raise RuntimeError("stop")

    if where == "model":
        inputs = {"input_ids": torch.full((1, 3), VOCABULARY + 1)}  # no such token
    with pytest.raises((RuntimeError, IndexError)), watch(model, observe):
        model(**inputs)
    assert type(model.config._attn_implementation) is str
    model(**texts())


def test_a_copied_configuration_is_not_watched() -> None:
    model = build("llama", "sdpa")
    with watch(model, ignore):
        assert model.config._attn_implementation == "sdpa"  # what models ask, and must go on to find
        assert model.config._attn_implementation != "eager"
        for copied in (copy.deepcopy(model.config), pickle.loads(pickle.dumps(model.config))):
            assert type(copied._attn_implementation) is str
            assert copied._attn_implementation == "sdpa"


def test_only_the_layers_asked_for() -> None:
    model = build("gemma3", "sdpa")
    shown = []
    with torch.no_grad(), watch(model, lambda call: shown.append(call.layer), layers=[4, 1]) as seen:
        model(**texts())
    assert shown == [1, 4]
    assert seen.unseen == {}
    with pytest.raises(InputError, match=r"layers: \[6\]; the model's attention layers are allowed: 0 to 5"):
        watch(model, ignore, layers=[6, 1]).__enter__()


def test_the_observer_gets_no_gradients_and_keeps_nothing_alive() -> None:
    model = build("llama", "sdpa")
    kept = []

    def observe(call) -> None:
        assert not torch.is_grad_enabled()
        assert not call.q.requires_grad
        assert not call.k.requires_grad
        kept.extend(weakref.ref(part) for part in (call, call.q.untyped_storage(), call.k.untyped_storage()))

    with torch.no_grad(), watch(model, observe):
        model(**texts(padding="left"), use_cache=False)
        gc.collect()
        assert not any(ref() is not None for ref in kept)


def test_training_is_the_same_too() -> None:
    """Gradients and dropout, which draws from the generator, are those of the unwatched model."""
    gradients = []
    for watched in (False, True):
        model = build("gpt2", "sdpa").train()
        torch.manual_seed(3)
        inputs = texts()
        if watched:
            with watch(model, ignore) as seen:
                model(**inputs, labels=inputs["input_ids"]).loss.backward()
            assert seen.seen == {0: 1, 1: 1}
        else:
            model(**inputs, labels=inputs["input_ids"]).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(same_bits(a, b) for a, b in zip(*gradients, strict=True))


def test_threads() -> None:
    """A watched and an unwatched model, and one model in two threads under two watches."""
    one, other, inputs = build("llama", "eager"), build("gemma2", "eager"), texts(padding="left")
    with torch.no_grad():
        wanted = one(**inputs).logits, other(**inputs).logits
    wrong: list[str] = []
    totals = []

    def work(model, right, watched: bool) -> None:
        with torch.no_grad():
            for _ in range(15):
                if watched:
                    with watch(model, ignore) as seen:
                        got = model(**inputs).logits
                    totals.append(min(seen.seen.values()))
                else:
                    got = model(**inputs).logits
                if not same_bits(got, right):
                    wrong.append(type(model).__name__)

    threads = [
        threading.Thread(target=work, args=given)
        for given in ((one, wanted[0], True), (one, wanted[0], True), (other, wanted[1], False))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(totals) == 30
    assert type(one.config._attn_implementation) is str


def test_models_within_models_keep_their_own_functions() -> None:
    """An encoder and a decoder whose configurations name different attention functions."""
    small = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
             "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": VOCABULARY,
             "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
             "decoder_start_token_id": 2}  # fmt: skip
    torch.manual_seed(0)
    model = tf.BartModel._from_config(tf.BartConfig(**small), attn_implementation="sdpa").eval()
    shown = []
    with torch.no_grad():
        plain = model(**texts(padding="right"))[0]
        with watch(model, lambda call: shown.append((call.name, call.causal))) as seen:
            watched = model(**texts(padding="right"))[0]
    assert same_bits(plain, watched)
    assert seen.unseen == {}
    assert dict(shown) == {
        "encoder.layers.0.self_attn": False,
        "encoder.layers.1.self_attn": False,
        "decoder.layers.0.self_attn": True,
        "decoder.layers.0.encoder_attn": False,
        "decoder.layers.1.self_attn": True,
        "decoder.layers.1.encoder_attn": False,
    }
    assert list(seen.names) == list(range(6))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("falcon", "computes attention by itself"),
        ("bloom", "computes attention by itself"),
        ("t5", "not the softmax attention|adds a position bias"),
        ("gpt2-upcast", "did not call its attention function"),
    ],
)
def test_what_cannot_be_seen_is_said(name: str, reason: str) -> None:
    torch.manual_seed(0)
    small = {"vocab_size": VOCABULARY, "hidden_size": 24, "num_attention_heads": 4, "n_head": 4, "pad_token_id": 0,
             "bos_token_id": 1, "eos_token_id": 2, "num_hidden_layers": 2, "n_layer": 2}  # fmt: skip
    if name == "falcon":
        model = tf.FalconModel._from_config(tf.FalconConfig(**small)).eval()
    elif name == "bloom":
        model = tf.BloomModel._from_config(tf.BloomConfig(**small)).eval()
    elif name == "t5":
        config = tf.T5Config(vocab_size=VOCABULARY, d_model=24, d_kv=6, num_heads=4, num_layers=2, d_ff=32,
                             pad_token_id=0, decoder_start_token_id=0)  # fmt: skip
        model = tf.T5EncoderModel._from_config(config).eval()
        torch.nn.init.normal_(model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight)
    else:
        model = build("gpt2", "eager", reorder_and_upcast_attn=True)
    calls = []
    with torch.no_grad():
        plain = model(**texts())[0]
        with watch(model, calls.append) as seen:
            watched = model(**texts())[0]
    assert same_bits(plain, watched)
    assert not calls
    assert list(seen.unseen) == [0, 1]
    with pytest.raises(InputError, match=rf"layers not watched: 0-1 \(.*({reason}).*\); seen: none"):
        seen.check()


def test_a_model_without_attention() -> None:
    model = tf.MambaModel._from_config(tf.MambaConfig(vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=1)).eval()
    assert find_attention(model) == {}
    with torch.no_grad(), watch(model, ignore) as seen:
        model(input_ids=texts(1, 4)["input_ids"])
    with pytest.raises(InputError, match="no attention layers"):
        seen.check()


def call_by_itself(module: torch.nn.Module, *parts: torch.Tensor) -> torch.Tensor:
    """Looks the function up outside the module's class, where no watch can know of it."""
    return tf.AttentionInterface()[module.config._attn_implementation](module, *parts, None)[0]


def test_others_that_share_the_configuration_go_on_as_they_did() -> None:
    model = build("llama", "sdpa")
    other = torch.nn.Identity()
    other.config, other.is_causal = model.config, True
    parts = torch.randn(3, 2, 4, 9, 6, generator=torch.Generator().manual_seed(0)).unbind()
    plain = call_by_itself(other, *parts)
    with watch(model, ignore) as seen:
        assert same_bits(call_by_itself(other, *parts), plain)
    assert seen.seen == {}


def test_spans() -> None:
    assert spans([5, 0, 1, 2, 7, 8]) == "0-2, 5, 7-8"
    assert spans([]) == "none"
