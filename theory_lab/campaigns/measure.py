"""What is measured on a finished model of a campaign: held-out loss, every head, inhibition, temperatures, tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theory_lab.errors import InputError

if TYPE_CHECKING:
    from theory_lab.corpus import Corpus
    from theory_lab.models import LoadedModel

#: Tokens of a task at one length: fewer sequences of long texts.
_TASK_TOKENS = 1 << 20
#: Measures of a head that are kept, by layer.
KEPT = (
    "sparsity", "sparsity_1", "sparsity_2", "max_abs", "max_abs_1", "max_abs_2", "g_sink_ratio_1", "sink_weight_1",
    "dead_rows", "dead_head", "entropy", "normalized_entropy", "support", "survivors", "survivors_1", "survivors_2",
    "consensus", "lift", "view_correlation",
)  # fmt: skip


def measure_model(folder: Path, wanted: Mapping[str, Any], corpus: str | None, device: str) -> dict[str, Any]:
    """Measure a trained model's folder.

    Parameters
    ----------
    folder : path
        Of a finished training.
    wanted : mapping
        Of :data:`theory_lab.campaigns.plan.MEASURES`.
    corpus : str, optional
        The corpus, for its held-out texts.
    device : str

    Returns
    -------
    dict
        Plain JSON. ``loss``: {length: [loss of each text]}; ``heads``: rows of layer, length and measures, averaged
        over heads (maxima: the largest) and texts; ``inhibition``: tokens and map; ``tasks``: rows of theory-lab
        evaluate; ``learned``: the mechanism's own parameters by layer; ``attention``: the mechanism that took its place
        for all the others, if one did.
    """
    from theory_lab.models import load_model

    loaded = load_model(str(folder), device=device)
    found: dict[str, Any] = {"learned": learned(loaded)}
    if wanted.get("attention"):
        exchange(loaded, str(wanted["attention"]))
        found["attention"] = str(wanted["attention"])
    if corpus is not None and (wanted.get("loss_lengths") or wanted.get("probe_lengths")):
        from theory_lab.corpus import Corpus

        texts, count = Corpus.open(corpus), int(wanted.get("windows", 8))
        stretch = bool(wanted.get("ntk", True))
        found["loss"] = losses(loaded, texts, wanted.get("loss_lengths", []), count, stretch)
        found["heads"] = heads(loaded, texts, wanted.get("probe_lengths", []), count, stretch)
    if wanted.get("sentence") and _attention(loaded)[0].mechanism.views == 2:
        found["inhibition"] = inhibition(loaded, wanted["sentence"])
    if wanted.get("tasks"):
        found["tasks"] = tasks(loaded, wanted, corpus)
    return found


def _attention(loaded: LoadedModel) -> list[Any]:
    from theory_lab.models.lab.attention import LabAttention

    return [module for module in loaded.model.modules() if isinstance(module, LabAttention)]


def exchange(loaded: LoadedModel, name: str) -> None:
    """Put a mechanism without parameters in the place of every layer's own; the weights stay as they were trained."""
    import copy

    from theory_lab.models.lab.mechanisms import build_mechanism

    config: Any = copy.deepcopy(loaded.model.config)
    config.attention, config.attention_parameters = name, {}
    for number, module in enumerate(_attention(loaded)):
        made = build_mechanism(config, number)
        if made.views != module.mechanism.views or any(True for _ in made.parameters()):
            raise InputError("attention", name, "a mechanism of as many views as the model's, without parameters")
        module.mechanism = made.to(loaded.device).eval()
    loaded.model.config.attention, loaded.model.config.attention_parameters = name, {}


def _stretched(loaded: LoadedModel, length: int, stretch: bool) -> AbstractContextManager[Any]:
    """Rotary positions for a length beyond training's, by the NTK-aware change of their base."""
    from theory_lab.probes.positions import scaled_positions

    trained = loaded.max_positions
    if not stretch or trained is None or length <= trained or not loaded.model.config.rotary:
        return scaled_positions(loaded.model, None)
    return scaled_positions(loaded.model, f"ntk:{2 ** math.ceil(math.log2(length / trained))}")


def losses(loaded: LoadedModel, corpus: Corpus, lengths: list[int], count: int, stretch: bool) -> dict[str, Any]:
    """Held-out loss (nats a token) of each text, at each length."""
    import torch

    found: dict[str, Any] = {}
    for length in lengths:
        windows = torch.from_numpy(corpus.windows("validation", length, count)).to(loaded.device)
        with _stretched(loaded, length, stretch), torch.inference_mode():
            rows = [float(loaded.model(input_ids=w[None], labels=w[None], use_cache=False).loss) for w in windows]
        found[str(length)] = rows
    return found


def heads(loaded: LoadedModel, corpus: Corpus, lengths: list[int], count: int, stretch: bool) -> list[dict[str, Any]]:
    """Every head's measures at each length, by layer: rows as the probes make them, averaged over texts and heads."""
    import pandas as pd
    import torch

    from theory_lab.probes.accumulate import GROUPS
    from theory_lab.probes.plan import Plan
    from theory_lab.probes.running import Watched, run_backbone
    from theory_lab.probes.texts import Window
    from theory_lab.probes.watching import watch
    from theory_lab.probes.whatif import parse_mechanism
    from theory_lab.settings import Silent

    trained = loaded.max_positions or max(lengths, default=0)
    # Rotary positions depend on the length beyond training's: such lengths are passes of their own.
    passes = [tuple(n for n in sorted(lengths) if n <= trained), *((n,) for n in sorted(lengths) if n > trained)]
    frames = []
    for group in (lengths_of for lengths_of in passes if lengths_of):
        plan = Plan(
            lengths=group,
            layers=tuple(range(loaded.layers)),
            heads=tuple(range(loaded.heads)),
            groups=GROUPS,
            mechanism=parse_mechanism("model"),
            windows=count,
            seed=0,
        )
        windows = corpus.windows("validation", group[-1], count)
        for index, ids in enumerate(windows.tolist()):
            observer = Watched(plan, group, Silent(), 0.0)
            with _stretched(loaded, group[-1], stretch), watch(loaded.model, observer), torch.inference_mode():
                run_backbone(loaded, ids)
            frame = observer.frame(Window("held-out", "", index, 0, tuple(ids)), "")
            assert frame is not None
            frames.append(frame)
    if not frames:
        return []
    table = pd.concat(frames, ignore_index=True)
    kept = [name for name in KEPT if name in table]
    table[kept] = table[kept].astype(float)
    by = table.groupby(["length", "layer"], sort=True)[kept]
    mean, most = by.mean(), by.max()
    for name in kept:
        if name.startswith("max_abs"):
            mean[name] = most[name]
    rows = mean.reset_index().to_dict("records")
    return [{str(k): None if v != v else v for k, v in row.items()} for row in rows]


def inhibition(loaded: LoadedModel, sentence: str) -> dict[str, Any]:
    """lambda a2_ij of a two-view mechanism on a sentence: the layer and head that inhibit most, and their map."""
    import torch

    from theory_lab.models.lab.attention import dense
    from theory_lab.models.lab.state import observed

    ids = loaded.tokenizer(sentence, return_tensors="pt")["input_ids"].to(loaded.device)
    maps: list[Any] = []

    def look(module: Any, q: Any, k: Any, views: Any, x: Any) -> None:
        if not views:
            return
        mechanism = module.mechanism
        signed = dense(mechanism, q, k, None, views=views, x=x)[1]
        zero = ((torch.zeros_like(views[0][0]), views[0][1]),)
        # Without the second view's queries nothing passes its threshold: what is left is the first view alone.
        first = dense(mechanism, q, k, None, views=zero, x=x)[1]
        maps.append((first - signed)[0])

    with torch.inference_mode(), observed(loaded.model, look):
        loaded.backbone(input_ids=ids, use_cache=False)
    if not maps:
        return {}
    stacked = torch.stack(maps).float()  # (layers, H, T, T)
    layer, head = divmod(int(stacked.sum((-1, -2)).argmax()), stacked.shape[1])
    tokens = [loaded.tokenizer.decode([token]) for token in ids[0].tolist()]
    return {"layer": layer, "head": head, "tokens": tokens, "map": stacked[layer, head].tolist()}


def learned(loaded: LoadedModel) -> list[dict[str, Any]]:
    """The mechanism's parameters, one list a layer: values by head."""
    rows = []
    for number, module in enumerate(_attention(loaded)):
        mechanism = module.mechanism
        values: dict[str, Any] = {"layer": number}
        for name in mechanism.__dict__.get("_transforms", {}):
            value = getattr(mechanism, name).detach().float()
            if value.numel() <= loaded.heads:
                values[name] = value.reshape(-1).tolist()
        rows.append(values)
    return rows


def tasks(loaded: LoadedModel, wanted: Mapping[str, Any], corpus: str | None) -> list[dict[str, Any]]:
    """Accuracy on tasks by length, as theory-lab evaluate gives it; rotary positions stretched as for the losses."""
    from theory_lab.tasks.registry import get_task, parse_spec, task_class

    stretch = bool(wanted.get("ntk", True))
    rows: list[dict[str, Any]] = []
    for text in wanted["tasks"]:
        name, parameters = parse_spec(text)
        if task_class(name).takes_text:
            parameters = {"tokenizer": str(loaded.folder), "corpus": corpus, **parameters}
        task = get_task(name, 0, **parameters)
        for length in wanted["task_lengths"]:
            if not task.shortest() <= length <= (task.longest() or length):
                continue
            with _stretched(loaded, length, stretch):
                found = task.evaluate(
                    loaded, [length], samples=int(wanted.get("samples", 100)), most_tokens=_TASK_TOKENS
                )
            # A model is called by its folder, which is one machine's.
            kept = found.rows.drop(columns="model").to_dict("records")
            rows += [{"asked": text, **{str(k): v for k, v in row.items()}} for row in kept]
    return rows
