"""Long texts without gradients: rows in blocks, heads with a bias over windows; positions in half of the heads."""

from __future__ import annotations

import copy

import pytest

from theory_lab import InputError

torch = pytest.importorskip("torch")
tf = pytest.importorskip("transformers")

from theory_lab.attention.softmax import Softmax  # noqa: E402
from theory_lab.models.lab import LabForCausalLM, language_mechanisms, make_config  # noqa: E402
from theory_lab.models.lab import attention as layer  # noqa: E402
from theory_lab.models.lab.mechanisms import build_mechanism, some_heads  # noqa: E402
from theory_lab.models.lab.positions import linear_bias, nape_slopes  # noqa: E402
from theory_lab.models.lab.state import observed  # noqa: E402
from theory_lab.models.lab.windows import in_blocks, windows  # noqa: E402

#: Those of the campaign of associative recall, and one of every other kind of bound.
RECALL = ["softmax", "ssmax", "adaptive-temperature", "asentmax", "asentmax-theta", "entmax", "sparsemax"]
LEARNED_ALPHA = "asentmax-theta, alpha learned"
OTHERS = [LEARNED_ALPHA, "rela", "diff-rela", "diff-softmax", "gated-softmax", "dex", "eta-weight", "eta-logit"]
HEADS, DIM = 4, 8
EPS = torch.finfo(torch.float32).eps


def mechanism(name: str):
    """A layer's mechanism whose parameters differ from head to head, and are float32 numbers."""
    learned = {"alpha": [1.3, 1.5, 1.6, 1.8], "learn_alpha": True} if name == LEARNED_ALPHA else {}
    config = make_config(
        "recall", name.partition(",")[0], vocab_size=40, positions="nape", hidden_size=6, intermediate_size=8,
        num_attention_heads=HEADS, head_dim=DIM, attention_parameters=learned,
    )  # fmt: skip
    made = build_mechanism(config, 0)
    g = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        parameter.data += 0.3 * torch.rand(parameter.shape, generator=g)
    return made.requires_grad_(False)


def operands(made, keys: int, queries: int, groups: int, size: float):
    """Pairs of every view, values, hidden states: float64 tensors of float32 numbers."""
    g = torch.Generator().manual_seed(keys + groups)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).double()

    pairs = tuple((size * draw(2, HEADS, queries, DIM), draw(2, groups, keys, DIM)) for _ in range(made.views))
    return pairs, draw(2, groups, keys, DIM), draw(2, queries, 6)


def defined(made, pairs, v, x, slopes):
    (q, k), *views = pairs
    bias = linear_bias(slopes, q.shape[2], k.shape[2])
    return layer.dense(made, q, k, v, views=tuple(views), x=x, bias=bias)


def narrow(thing, dtype=torch.float32):
    if isinstance(thing, torch.Tensor):
        return thing.to(dtype)
    return tuple(narrow(one, dtype) for one in thing)


def agree(made, pairs, v, x, slopes, kinds=(torch.float64, torch.float32)) -> None:
    """What is computed over windows is the definition, in each precision within twice its own error and a band."""
    free = HEADS // 2
    wide = copy.deepcopy(made).double()
    with torch.inference_mode():
        exact = defined(wide, pairs, v, x, slopes)[0]
        rough = defined(made, narrow(pairs), narrow(v), narrow(x), slopes)[0]
        error, size = (rough - exact).abs().max(), v.abs().max() + exact.abs().max()
        for kind in kinds:
            own = wide if kind == torch.float64 else made
            found = layer._long(own, narrow(pairs, kind), narrow(v, kind), narrow(x, kind), slopes, free)
            assert found.dtype == kind
            # Errors of rounding are in proportion to its unit: those of float64 are 2^-29 of float32's.
            shrink = torch.finfo(kind).eps / EPS
            assert (found - exact).abs().max() <= 2 * shrink * (error + 16 * EPS * size), (kind, error)


@pytest.mark.parametrize("name", RECALL + OTHERS)
def test_windows_give_what_the_definition_gives(name):
    made = mechanism(name)
    slopes = nape_slopes(HEADS, steepest=2.0)
    for keys, queries, groups, size in ((161, 161, 4, 1.0), (251, 90, 2, 2.0), (129, 129, 1, 0.1)):
        agree(made, *operands(made, keys, queries, groups, size), slopes)


@pytest.mark.parametrize("name", ["softmax", "asentmax", "rela"])
def test_large_scores_win_against_any_distance(name):
    made = mechanism(name)
    slopes = nape_slopes(HEADS, steepest=0.5)
    pairs, v, x = operands(made, 150, 150, 4, 1.0)
    (q, k), *_ = pairs
    k[:, :, 40] *= 50.0  # its scores reach farther than the text
    agree(made, pairs, v, x, slopes)
    with torch.inference_mode():
        weights = defined(made, narrow(pairs), narrow(v), narrow(x), slopes)[1]
    assert (weights[:, -1, 120:, 40] > 0).any()
    q[:, :, 7] = 0.0  # all scores equal
    agree(made, pairs, v, x, slopes)
    # The bound itself: one key as good as it allows, all others, the row's own too, as bad.
    q[:], k[:] = DIM**0.25, -10.0 / DIM**0.75
    k[:, :, 5] *= -1.0
    agree(made, pairs, v, x, slopes)


@pytest.mark.parametrize("name", [*RECALL, "rela", "diff-softmax"])
def test_no_weight_that_counts_lies_beyond_a_window(name):
    made = mechanism(name)
    slopes = nape_slopes(HEADS, steepest=4.0)[2:]
    pairs, v, x = operands(made, 300, 300, 4, 0.5)
    heads = slice(2, 4)
    part = some_heads(made, heads)
    cut = tuple((q[:, heads], k[:, heads]) for q, k in pairs)
    with torch.inference_mode():
        wide = some_heads(copy.deepcopy(made).double(), heads)
        reach = windows(part, narrow(cut), slopes, narrow(x))
        weights = defined(wide, cut, v[:, heads], x, slopes)[1]
    assert reach == sorted(reach), "a steeper slope has the smaller window"
    assert max(reach) < 300
    distance = -linear_bias(torch.ones(1), 300, 300)[0]
    for head, window in enumerate(reach):
        far = weights[:, head].abs() * (distance >= window)
        limit = EPS / 16 if "soft" in name or name in ("ssmax", "adaptive-temperature") else 0.0
        assert far.sum(-1).max() <= limit * weights[:, head].abs().sum(-1).max()


@pytest.mark.parametrize("name", ["ssmax", "asentmax"])
def test_in_bfloat16_only_what_goes_in_and_out_is_rounded(name):
    made = mechanism(name)
    slopes = nape_slopes(HEADS, steepest=2.0)
    pairs, v, x = (narrow(narrow(thing, torch.bfloat16), torch.float64) for thing in operands(made, 161, 70, 2, 1.0))
    with torch.inference_mode():
        exact = defined(copy.deepcopy(made).double(), pairs, v, x, slopes)[0]
        low = [narrow(thing, torch.bfloat16) for thing in (pairs, v, x)]
        found = layer._long(made, *low, slopes, HEADS // 2)
    assert found.dtype == torch.bfloat16
    # Half a unit in the last place of the result, and a little for float32's own.
    limit = torch.finfo(torch.bfloat16).eps / 2 * exact.abs() + 256 * EPS * v.abs().max()
    assert ((found - exact).abs() <= limit).all()


@pytest.mark.parametrize("size", [1.0, 3.0])
def test_adaptive_temperatures_without_a_map(size):
    made = mechanism("adaptive-temperature")
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, heads, rows, DIM, generator=g) for heads, rows in ((2, 301), (1, 901), (1, 901)))
    q = q * size
    exact = layer.dense(made, q.double(), k.double(), v.double())[0]
    error = (layer.dense(made, q, k, v)[0] - exact).abs().max()
    with torch.inference_mode():
        found = layer._adaptive(made, q, k, v, None)
        wide = layer._adaptive(made, q.double(), k.double(), v.double(), None)
    assert found is not None
    assert layer._adaptive(made, q, k, v, None) is None  # gradients are wanted
    band = error + 16 * EPS * v.abs().max()
    assert (found - exact).abs().max() <= 2 * band
    assert (wide - exact).abs().max() <= 2 * 2.0**-29 * band


class Watching(Softmax):
    """Notes what its rows are told."""

    def row_weights(self, scores, scope):
        self.__dict__.setdefault("seen", []).append((scope, scores[0]))
        return super().row_weights(scores, scope)


@pytest.mark.parametrize(("queries", "window"), [(300, 32), (130, 32), (300, 300), (1, 64), (300, 200)])
def test_a_window_counts_every_key_before_it(queries, window, monkeypatch):
    """n, the queries and the hidden states of a row are those of the whole text, whatever keys it is compared with."""
    from theory_lab.models.lab import windows as module

    monkeypatch.setattr(module, "_ENTRIES_CPU", 1 << 15)  # several blocks, several times
    made = Watching()
    pairs, v, x = operands(made, 300, queries, 2, 1.0)
    in_blocks(made, pairs, v, x=x, window=window)
    told: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for scope, scores in made.seen:
        assert scope.visible.shape == scores.shape
        width = scores.shape[0] // 2
        for block in range(scores.shape[0]):
            for row in range(scores.shape[2]):
                number = int(scope.n[block, 0, row])
                place = number - 1 - (300 - queries)
                if place >= queries:
                    continue  # rows that fill up the last block
                assert torch.equal(scope.q[block, :, row], pairs[0][0][block // width, :, place])
                assert torch.equal(scope.x[block, row], x[block // width, place])
                told.setdefault((block // width, place), set()).add((number, int(scope.visible[block, 0, row].sum())))
    assert told == {
        (batch, place): {(300 - queries + place + 1, min(300 - queries + place + 1, window))}
        for batch in range(2) for place in range(queries)
    }  # fmt: skip


def model(attention: str, **more) -> LabForCausalLM:
    torch.manual_seed(0)
    settings = {"hidden_size": 32, "num_attention_heads": 4, "head_dim": 8, "intermediate_size": 40} | more
    made = LabForCausalLM(make_config("recall", attention, vocab_size=40, **settings)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # scores that are not all alike
    return made


def tokens(length: int, batch: int = 1) -> torch.Tensor:
    return torch.randint(3, 40, (batch, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize(("name", "groups"), [("softmax", 2), ("asentmax", 4), ("ssmax", 1), ("eta-logit", 4)])
def test_a_model_gives_the_same_logits_with_and_without_windows(name, groups, monkeypatch):
    monkeypatch.setattr(layer, "_MANY", 1)  # of texts this short, too
    taken = []
    monkeypatch.setattr(layer, "_long", lambda *call, _long=layer._long: taken.append(1) or _long(*call))
    made = model(name, positions="nape", num_key_value_heads=groups)
    ids = tokens(223)
    rough = made(ids).logits.detach()  # where gradients are wanted: the definition
    exact = copy.deepcopy(made).double()(ids).logits.detach()
    budget = 2 * ((rough - exact).abs().max() + 32 * EPS * exact.abs().max())
    with torch.inference_mode():
        whole = made(ids).logits
        assert len(taken) == 2  # layers
        first = made(ids[:, :110], use_cache=True)
        cache = getattr(first, "cache", None) or first.past_key_values
        rest = made(ids[:, 110:], past_key_values=cache, use_cache=True)
        padded = made(ids, attention_mask=(torch.arange(223) >= 5).long()[None]).logits
        shown = made(ids, output_attentions=True)
    assert (whole - exact).abs().max() <= budget
    assert (torch.cat([first.logits, rest.logits], 1) - exact).abs().max() <= budget
    assert (shown.logits - exact).abs().max() <= budget
    assert shown.attentions[0].shape == (1, 4, 223, 223)
    assert len(taken) == 6
    assert not torch.allclose(padded[:, -1], whole[:, -1], rtol=0, atol=float(budget))  # keys were hidden


def test_what_runs_in_blocks_and_holds_no_map(monkeypatch):
    """Every mechanism whose rows stand alone; the others say that they hold a map."""
    taken = []
    monkeypatch.setattr(layer, "in_blocks", lambda *a, **k: taken.append(1) or in_blocks(*a, **k))
    for name in language_mechanisms():
        made = model(name, num_hidden_layers=1)
        alone = name not in ("h2o", "landmark", "sparse-transformer", "streaming-llm")
        assert made.model.holds_maps != alone, name
    made = model("tra-sharp", num_hidden_layers=1)  # no fast form
    ids = tokens(520)
    with torch.inference_mode():
        found = made(ids).logits
    assert taken == [1]
    wanted = made(ids).logits
    assert taken == [1]  # gradients are wanted: the definition
    assert (found - wanted).abs().max() <= 64 * EPS * wanted.abs().max()
    few = tokens(20, 3)
    with torch.inference_mode():
        small = made(few).logits
        assert taken == [1]
        monkeypatch.setattr(layer, "_MOST_CPU", 3 * 4 * 20 * 20 - 1)
        assert (made(few).logits - small).abs().max() <= 64 * EPS * small.abs().max()
    assert taken == [1, 1]


def test_a_task_takes_texts_whole_where_no_map_is_held(tmp_path, monkeypatch):
    from theory_lab.models import load_model
    from theory_lab.tasks import get_task

    task = get_task("recall", 0, symbols=16, queries=4)
    made = LabForCausalLM(make_config(
        "recall", "asentmax", vocab_size=task.vocab_size, positions="nape", hidden_size=32, num_attention_heads=4,
        head_dim=8, intermediate_size=40,
    ))  # fmt: skip
    made.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    monkeypatch.setattr(layer, "_MANY", 1)
    whole, pieces = (task.evaluate(loaded, [200], samples=2, chunk=chunk).rows.iloc[0] for chunk in (None, 64))
    assert (whole["chunk"], pieces["chunk"]) == (200, 64)
    assert (whole["right"], whole["samples"]) == (pieces["right"], 2)
    assert whole["loss"] == pytest.approx(pieces["loss"], rel=1e-4)


# ---- rotary positions in half of the heads ---------------------------------------------------------------------------


def seen_by(made: LabForCausalLM, ids: torch.Tensor) -> list[torch.Tensor]:
    calls: list[tuple] = []
    with torch.inference_mode(), observed(made, lambda *call: calls.append(call)):
        made(ids)
    _, q, k, views, _ = calls[0]
    return [q, k, *(part for view in views for part in view)]


@pytest.mark.parametrize("name", ["tda", "tra"])
def test_half_rope_turns_half_of_the_heads(name):
    from theory_lab.probes.positions import scaled_positions

    ids = tokens(19)
    half = model(name, positions="half-rope", num_key_value_heads=2)
    kinds = {}
    for positions in ("rope", "nope"):
        other = copy.deepcopy(half)
        other.config.positions = positions
        kinds[positions] = seen_by(other, ids)
    found = seen_by(half, ids)
    with scaled_positions(half, "ntk:4"):
        stretched = seen_by(half, ids)
    assert half.config.rope_ntk_factor == 1.0
    assert len(found) == 2 * half.model.layers[0].attention.mechanism.views
    for part, turned, plain, longer in zip(found, kinds["rope"], kinds["nope"], stretched, strict=True):
        free = part.shape[1] // 2  # queries have four heads, keys two
        assert torch.equal(part[:, :free], plain[:, :free])
        assert torch.equal(part[:, free:], turned[:, free:])
        assert not torch.equal(plain[:, free:, 1:], turned[:, free:, 1:])
        assert torch.equal(longer[:, :free], part[:, :free])
        assert not torch.equal(longer[:, free:], part[:, free:])


def test_half_rope_with_a_cache_padding_and_a_file(tmp_path):
    made = model("tda", positions="half-rope", num_key_value_heads=2, attention_parameters={"beta": 0.3})
    ids = tokens(17, 2)
    with torch.inference_mode():
        whole = made(ids).logits
        budget = 64 * EPS * whole.abs().max()
        first = made(ids[:, :6], use_cache=True)
        cache = getattr(first, "cache", None) or first.past_key_values
        rest = made(ids[:, 6:], past_key_values=cache).logits
        pad = torch.full((2, 4), made.config.pad_token_id)
        mask = torch.cat([torch.zeros(2, 4), torch.ones(2, 17)], 1)
        left = made(torch.cat([pad, ids], 1), attention_mask=mask).logits[:, 4:]
        made.save_pretrained(tmp_path)
        again = tf.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert again.config.positions == "half-rope"
        assert torch.equal(again(ids).logits, whole)
    assert (torch.cat([first.logits, rest], 1) - whole).abs().max() <= budget
    assert (left - whole).abs().max() <= budget


@pytest.mark.parametrize(
    ("heads", "groups", "fits"), [(4, 2, True), (4, 1, False), (6, 2, True), (6, 3, False), (1, 1, True)]
)
def test_half_rope_needs_keys_of_one_half(heads, groups, fits):
    def make():
        return make_config("recall", "tda", vocab_size=40, positions="half-rope", hidden_size=64,
                           num_attention_heads=heads, num_key_value_heads=groups, head_dim=8)  # fmt: skip

    if fits:
        assert make().rotary
        return
    with pytest.raises(InputError, match="num_key_value_heads"):
        make()
