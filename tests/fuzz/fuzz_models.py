"""Targets that read models: headers of weight files, folders of models, checkpoints, thresholds."""

from __future__ import annotations

import functools
import json
import random
import struct
import tempfile
from pathlib import Path
from typing import Any

import fuzz_inputs as make
from fuzz_files import ROOT
from fuzz_harness import Place, Target, put

# headers


def _safetensors(header: Any, data: bytes = b"\0" * 64) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text)) + text + data


_HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b.weight": {"dtype": "F16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "I64", "shape": [], "data_offsets": [32, 40]}, "d": {"dtype": "U8", "shape": [0, 5], "data_offsets": [40, 40]},
    "e": {"dtype": "BOOL", "shape": [24], "data_offsets": [40, 64]},
}  # fmt: skip


def _make_safetensors(rng: random.Random) -> bytes:
    pick = rng.random()
    if pick < 0.2:
        return make.damaged(rng, _safetensors(_HEADER))
    tree = make.altered(rng, _HEADER)
    raw = _safetensors(make.as_json(rng, tree))
    if pick < 0.35:
        length = rng.choice((0, 1, 2**31, 2**63, 2**64 - 1, len(raw), len(raw) - 8, len(raw) - 7, 100_000_001))
        raw = struct.pack("<Q", length) + raw[8:]
    return raw


def _header_safetensors(data: bytes, place: Place) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    from theory_lab.models.headers import read_safetensors

    path = place.given / "model.safetensors"
    path.write_bytes(data)
    header = read_safetensors(path)
    try:
        found = load_file(path)
    except (SafetensorError, KeyError, TypeError, ValueError):  # it knows fewer types, and refuses more
        return
    assert {name: array.shape for name, array in found.items()} == {t.name: t.shape for t in header.tensors}


@functools.cache
def _gguf() -> tuple[bytes, ...]:
    import gguf
    import numpy as np

    made = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in (0, 1):
            path = Path(folder) / f"{kind}.gguf"
            writer = gguf.GGUFWriter(path, "llama")
            for name, number in (
                ("block_count", 1), ("context_length", 64), ("embedding_length", 32), ("feed_forward_length", 48),
                ("attention.head_count", 2), ("attention.head_count_kv", 2), ("rope.dimension_count", 16), ("vocab_size", 40),
            ):  # fmt: skip
                writer.add_uint32(f"llama.{name}", number)
            writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
            writer.add_float32("llama.rope.freq_base", 10000.0)
            writer.add_tokenizer_model("gpt2")
            writer.add_token_list(["<s>", "</s>", "a", "b", "0", "1", "a0", "b1", *(f"t{i}" for i in range(32))])
            writer.add_token_types([3, 3, *[1] * 38])
            writer.add_token_merges(["a 0", "b 1"])
            writer.add_bos_token_id(0)
            writer.add_eos_token_id(1)
            draw = np.random.default_rng(kind)
            shapes = {"token_embd.weight": (40, 32), "output_norm.weight": (32,), "output.weight": (40, 32)}
            for part, shape in (
                ("attn_norm", (32,)), ("ffn_norm", (32,)), ("attn_q", (32, 32)), ("attn_k", (32, 32)), ("attn_v", (32, 32)),
                ("attn_output", (32, 32)), ("ffn_gate", (48, 32)), ("ffn_up", (48, 32)), ("ffn_down", (32, 48)),
            ):  # fmt: skip
                shapes[f"blk.0.{part}.weight"] = shape
            for name, shape in shapes.items():
                writer.add_tensor(
                    name, draw.normal(size=shape).astype(np.float16 if kind and len(shape) > 1 else np.float32)
                )
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            made.append(path.read_bytes())
    return tuple(made)


_KEYS = (b"llama.block_count", b"llama.embedding_length", b"llama.vocab_size", b"llama.attention.head_count", b"llama.context_length",
         b"llama.feed_forward_length", b"general.alignment", b"tokenizer.ggml.tokens", b"llama.rope.dimension_count")  # fmt: skip


def _make_gguf(rng: random.Random) -> bytes:
    data = rng.choice(_gguf())
    pick = rng.random()
    if pick < 0.35:  # a number of the metadata
        at = data.find(rng.choice(_KEYS))
        if at > 0:
            at = data.find(struct.pack("<I", 4), at)
            value = rng.choice([n for n in make.NUMBERS if type(n) is int and 0 <= n < 2**32])
            return data[: at + 4] + struct.pack("<I", value) + data[at + 8 :]
    if pick < 0.6:  # counts, and what stands among the tensors' entries
        begin = rng.choice((8, 16, data.find(b"blk.0") + rng.randrange(120)))
        value = rng.choice([n for n in make.NUMBERS if type(n) is int and 0 <= n < 2**64])
        return data[:begin] + struct.pack("<Q", value) + data[begin + 8 :]
    if pick < 0.65:
        return data.replace(b"attn_k", b"attn_q")
    head = data.find(b"blk.0.ffn_down") + 80
    return make.damaged(rng, data[:head]) + data[head:] if pick < 0.9 else make.damaged(rng, data)


def _header_gguf(data: bytes, place: Place) -> None:
    from theory_lab.models.checks import check_announced
    from theory_lab.models.headers import read_gguf

    path = place.given / "model.gguf"
    path.write_bytes(data)
    header = read_gguf(path)
    check_announced(path, header.metadata, header)
    from gguf import GGUFReader

    found = GGUFReader(path)  # what was accepted, the library reads alike
    assert sorted((t.name, int(t.n_elements)) for t in found.tensors) == sorted(
        (t.name, t.elements) for t in header.tensors
    )


@functools.cache
def _names() -> frozenset[str]:
    """What the tensors of the undamaged file are called."""
    from theory_lab.models.headers import read_gguf

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.gguf")
        path.write_bytes(_gguf()[0])
        return frozenset(tensor.name for tensor in read_gguf(path).tensors)


def _convert(data: bytes, place: Place) -> None:
    from theory_lab.models import convert_gguf
    from theory_lab.models.headers import read_gguf, read_safetensors

    path = place.given / "model.gguf"
    path.write_bytes(data)
    made = convert_gguf(path, place.out / "converted", quiet=True)
    stored = read_safetensors(made / "model.safetensors")
    names = _names()  # what the file calls otherwise is not read, and nothing random stands in for it
    assert stored.elements == sum(tensor.elements for tensor in read_gguf(path).tensors if tensor.name in names)


# folders


@functools.cache
def _folders() -> tuple[dict[str, bytes], ...]:
    """Small models of several architectures, as files by name."""
    import torch
    from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    from theory_lab.models.lab import LabConfig, LabForCausalLM

    torch.manual_seed(0)
    made = []
    tokenizer = (ROOT / "theory_lab/models/zoo/softmax-pico/tokenizer.json").read_text(encoding="utf-8")
    tree = json.loads(tokenizer)
    kept = dict(list(tree["model"]["vocab"].items())[:300])
    tree["model"].update(vocab=kept, merges=[m for m in tree["model"]["merges"] if _joined(m) in kept][:20])
    words = json.dumps(tree).encode()
    settings = (ROOT / "theory_lab/models/zoo/softmax-pico/tokenizer_config.json").read_bytes()
    for model in (
        LabForCausalLM(LabConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                                 max_position_embeddings=32, attention="tda")),
        LlamaForCausalLM(LlamaConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                                     num_key_value_heads=1, max_position_embeddings=32)),
        GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=16, n_layer=1, n_head=2, n_positions=32)),
        BertModel(BertConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                             max_position_embeddings=32)),
    ):  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            files = {p.name: p.read_bytes() for p in Path(folder).iterdir()}
        made.append({**files, "tokenizer.json": words, "tokenizer_config.json": settings})
    return tuple(made)


def _joined(merge: Any) -> str:
    return "".join(merge) if isinstance(merge, list) else merge.replace(" ", "")


_EVIL = b"import os\nos.system('touch /tmp/theory-lab-owned')\n"


def _make_folder(rng: random.Random) -> dict[str, Any]:
    files: dict[str, Any] = dict(rng.choice(_folders()))
    pick = rng.random()
    config = json.loads(files["config.json"])
    if pick < 0.45:
        if rng.random() < 0.5:  # a size of the model
            key = rng.choice([k for k, v in config.items() if isinstance(v, (int, float)) and not isinstance(v, bool)])
            config[key] = make.number(rng)
        else:
            config = make.altered(rng, config)
        files["config.json"] = make.as_json(rng, config)
    elif pick < 0.6:
        tree = make.altered(rng, json.loads(files["tokenizer.json"]))
        files["tokenizer.json"] = make.as_json(rng, tree)
    elif pick < 0.7:
        files["tokenizer_config.json"] = make.as_json(
            rng, make.altered(rng, json.loads(files["tokenizer_config.json"]))
        )
    elif pick < 0.85:
        data = files["model.safetensors"]
        size = struct.unpack("<Q", data[:8])[0]
        header = make.altered(rng, json.loads(data[8 : 8 + size]))
        files["model.safetensors"] = (
            _safetensors(make.as_json(rng, header), data[8 + size :]) if rng.random() < 0.7 else make.damaged(rng, data)
        )
    else:  # code, in all the ways in which a folder can ask for it
        how = rng.randrange(7)
        files |= {
            "modeling_evil.py": _EVIL,
            "configuration_evil.py": _EVIL,
            "tokenization_evil.py": _EVIL,
            "__init__.py": _EVIL,
        }
        if how == 0:
            files["config.json"] = json.dumps(
                {**config, "auto_map": {"AutoConfig": "configuration_evil.C", "AutoModel": "modeling_evil.M"}}
            )
        elif how == 1:
            files["tokenizer_config.json"] = json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_evil.T", None]}})
        elif how == 2:
            files["config.json"] = json.dumps({**config, "attn_implementation": "evil/kernel"})
        elif how == 3:
            del files["model.safetensors"]
            files["pytorch_model.bin"] = b"\x80\x04cos\nsystem\n(S'id'\ntR."
        elif how == 4:
            name = rng.choice(
                (
                    "../../evil.safetensors",
                    "/etc/passwd",
                    "pytorch_model.bin",
                    "model.safetensors",
                    "x/../model.safetensors",
                )
            )
            files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": {"a": name}})
            files["pytorch_model.bin"] = b"\x80\x04cos\nsystem\n(S'id'\ntR."
        elif how == 5:
            files["config.json"] = json.dumps(
                {**config, "transformers_weights": rng.choice(("../x.bin", "pytorch_model.bin", 3))}
            )
            files["pytorch_model.bin"] = b"\x80\x04cos\nsystem\n(S'id'\ntR."
        else:
            files["config.json"] = json.dumps(
                {**config, "quantization_config": {"quant_method": rng.choice(("gptq", "bitsandbytes", "x", 3))}}
            )
    return files


def _folder(files: dict[str, Any], place: Place) -> None:
    from theory_lab.models import load_model

    put(files, place.given)
    loaded = load_model(place.given)
    if loaded.tokenizer is not None:
        loaded.tokenizer("a b")


def _check_folder(files: dict[str, Any], place: Place) -> None:
    from theory_lab.models.checks import check_folder, check_tokenizer
    from theory_lab.tasks.evaluation import trained_parameters

    put(files, place.given)
    check_folder(place.given)
    check_tokenizer(place.given)
    trained_parameters(place.given, "recall")


# what training leaves


@functools.cache
def _checkpoint() -> dict[str, bytes]:
    import torch

    from theory_lab.models.lab import LabConfig, LabForCausalLM
    from theory_lab.training import checkpoints

    torch.manual_seed(0)
    model = _tiny(LabConfig, LabForCausalLM)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        root = checkpoints.save(Path(folder), 5, model, optimizer, {"identity": {"seed": 0}}, 2)
        files = {f"checkpoints/{root.name}/{p.name}": p.read_bytes() for p in root.iterdir()}
    log = b"step,tokens,loss,lr,grad_norm,val_loss,val_loss_se,val_accuracy,seconds,tokens_per_second\n1,8,2.5,0.1,1,,,,0.1,80\n"
    record = {"finished": True, "identity": {"seed": 0}, "source": {"task": "recall", "parameters": {"queries": 8}}}
    return {**files, "log.csv": log, "train.json": json.dumps(record).encode()}


def _tiny(config: Any, model: Any) -> Any:
    return model(config(vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
                        max_position_embeddings=16))  # fmt: skip


def _make_checkpoint(rng: random.Random) -> dict[str, bytes]:
    files = dict(_checkpoint())
    name = rng.choice(list(files))
    data = files[name]
    if name.endswith(".json"):
        files[name] = make.as_json(rng, make.altered(rng, json.loads(data)))
    elif name.endswith(".safetensors") and rng.random() < 0.6:
        size = struct.unpack("<Q", data[:8])[0]
        files[name] = _safetensors(
            make.as_json(rng, make.altered(rng, json.loads(data[8 : 8 + size]))), data[8 + size :]
        )
    else:
        files[name] = make.damaged(rng, data)
    if rng.random() < 0.1:
        files[
            f"checkpoints/step-{make.word(rng)[:40].replace('/', '').replace(chr(0), '').encode('utf-8', 'replace').decode()}/state.json"
        ] = b"{}"
    return files


_built: list[Any] = []


def _resume(files: dict[str, bytes], place: Place) -> None:
    import torch

    from theory_lab.models.lab import LabConfig, LabForCausalLM
    from theory_lab.tasks.evaluation import trained_parameters
    from theory_lab.training import checkpoints, record
    from theory_lab.training.logs import COLUMNS, Table

    put(files, place.given)
    if not _built:
        model = _tiny(LabConfig, LabForCausalLM)
        _built.extend((model, torch.optim.AdamW(model.parameters())))
    record.find(place.given, {"seed": 0})
    Table(place.given / "log.csv", COLUMNS).begin(1)
    trained_parameters(place.given, "recall")
    for path in reversed(checkpoints.found(place.given)):
        checkpoints.step_of(path)
        try:  # as the training does: what is damaged is passed over
            checkpoints.read_state(path)
            checkpoints.load(path, *_built)
        except (OSError, ValueError):
            continue


_THRESHOLDS = {"thresholds": [[0.1, None, -2.0], [1, 2, 3]], "model": "m", "target": 0.01}


def _make_thresholds(rng: random.Random) -> bytes:
    return make.as_json(rng, make.altered(rng, _THRESHOLDS))


def _thresholds(data: bytes, place: Place) -> None:
    from theory_lab.calibration import read_thresholds

    path = place.given / "thresholds.json"
    path.write_bytes(data)
    found = read_thresholds(path)
    assert found.ndim == 2


TARGETS = (
    Target("header-safetensors", _make_safetensors, _header_safetensors, 85),
    Target("header-gguf", _make_gguf, _header_gguf, 12),
    Target("model-check", _make_folder, _check_folder, 2, heavy=True),
    Target("model-load", _make_folder, _folder, 0.15, heavy=True),
    Target("gguf-convert", _make_gguf, _convert, 0.1, heavy=True),
    Target("checkpoint", _make_checkpoint, _resume, 0.6, heavy=True),
    Target("thresholds", _make_thresholds, _thresholds, 20, heavy=True),
)
