"""Models in GGUF files: dequantized once, and refused by name where they are not what they say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from left_behind import leftovers

from theory_lab import InputError, StoreError

gguf = pytest.importorskip("gguf", reason="needs theory-lab[models]")
torch = pytest.importorskip("torch", reason="needs theory-lab[models]")
tf = pytest.importorskip("transformers", reason="needs theory-lab[models]")

pytestmark = pytest.mark.usefixtures("own_cache")


def write_gguf(path: Path, bias: bool = False) -> Path:
    """A Llama in the GGUF format: quantized weights, configuration and tokenizer in one file; with a bias perhaps."""
    import numpy as np

    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    words = ["<unk>", "<s>", "</s>", *(chr(97 + i) for i in range(26)), "Ġ", "ab", "bc"]
    width, inner, layers, heads, groups = 64, 96, 2, 4, 2
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_rope_dimension_count(width // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    writer.add_token_types([3, 3, 3] + [1] * 29)
    writer.add_token_merges(["a b", "b c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {"token_embd": (len(words), width)}
    narrow = (width // heads * groups, width)
    for layer in range(layers):
        for name, shape in {
            "attn_q": (width, width), "attn_k": narrow, "attn_v": narrow, "attn_output": (width, width),
            "ffn_gate": (inner, width), "ffn_up": (inner, width),
            "ffn_down": (width, inner),
        }.items():  # fmt: skip
            shapes[f"blk.{layer}.{name}"] = shape
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(width, np.float32))
    if bias:
        writer.add_tensor("blk.1.attn_q.bias", np.ones(width, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    kind = gguf.GGMLQuantizationType.Q4_1
    for name, shape in shapes.items():
        packed = gguf.quants.quantize(rng.standard_normal(shape).astype(np.float32), kind)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def with_number(gguf_file: bytes, key: bytes, value: int) -> bytes:
    """The file with another value of a key whose value is a 32-bit number."""
    at = gguf_file.index(key) + len(key)
    assert gguf_file[at : at + 4] == b"\4\0\0\0"
    return gguf_file[: at + 4] + value.to_bytes(4, "little") + gguf_file[at + 8 :]


def test_a_gguf_file_is_dequantized_once(tmp_path: Path, own_cache: Path, monkeypatch) -> None:
    from theory_lab.models import conversion, convert_gguf, load_model

    file = write_gguf(tmp_path / "small.gguf")
    loaded = load_model(file)
    direct = tf.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    ids = torch.tensor([[1, 5, 6, 7]])
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, direct(ids).logits)
    assert (loaded.heads, loaded.key_heads) == (4, 2)
    assert own_cache in loaded.folder.parents
    monkeypatch.setattr(conversion, "convert_into", None)  # the second time needs no conversion
    assert load_model(file).folder == loaded.folder
    os.utime(file, (1, 1))  # another file of that name does
    with pytest.raises(TypeError):
        load_model(file)
    monkeypatch.undo()
    folder = convert_gguf(file, tmp_path / "made", quiet=True)
    assert sorted(path.name for path in folder.iterdir() if path.suffix == ".safetensors") == ["model.safetensors"]
    assert not (tmp_path / ".made.lock").exists()
    with pytest.raises(InputError, match=r"folder: .*; a new or empty folder is allowed"):
        convert_gguf(file, folder)


def test_bad_gguf_files(tmp_path: Path, own_cache: Path) -> None:
    from theory_lab.models import convert_gguf

    file = tmp_path / "x.gguf"
    file.write_bytes(b"not one")
    with pytest.raises(InputError, match="does not begin as one does"):
        convert_gguf(file, tmp_path / "made")
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    for cut in (4, 60, len(whole) // 2):
        file.write_bytes(whole[:cut])
        with pytest.raises(InputError, match="model: "):
            convert_gguf(file, tmp_path / "made", quiet=True)
        assert not (tmp_path / "made").exists()
    file.write_bytes(whole.replace(b"llama", b"lxama"))
    with pytest.raises(InputError, match="transformers cannot read it"):
        convert_gguf(file, tmp_path / "made", quiet=True)
    few = "its configuration says {} layers, and its tensors go up to layer 1"
    lacking = r"its weights lack the tensor model\.layers\.1\.self_attn\.q_proj\.weight"
    wrong = r"its tensor model\.layers\.0\.mlp\.down_proj\.weight is 64 x 96, and its configuration makes it 64 x 48"
    for damaged, why in (
        (whole.replace(b"blk.1.attn_q", b"blk.1.attn_z"), lacking),  # transformers would fill it up with random numbers
        (with_number(whole, b"llama.feed_forward_length", 48), wrong),
        (with_number(whole, b"llama.block_count", 3), few.format(3)),
        (with_number(whole, b"llama.block_count", 1), few.format(1)),
        (whole.replace(b"llama.block_count", b"llama.block_counx"), few.format(32)),
        (write_gguf(tmp_path / "whole.gguf", bias=True).read_bytes(), r"no place for its tensor blk\.1\.attn_q\.bias"),
    ):
        file.write_bytes(damaged)
        with pytest.raises(InputError, match=why):
            convert_gguf(file, tmp_path / "made", quiet=True)
    assert leftovers(own_cache) == []
    assert sorted(path.name for path in tmp_path.iterdir() if not path.is_dir()) == ["whole.gguf", "x.gguf"]


def test_a_gguf_file_that_there_is_no_room_for(tmp_path: Path) -> None:
    """Safetensors tells of a full disk by an error of its own."""
    import resource

    from theory_lab.models import convert_gguf

    file = write_gguf(tmp_path / "small.gguf")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(StoreError, match=r"made; it cannot be written \(File too large\)"):
            convert_gguf(file, tmp_path / "made", quiet=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["small.gguf"]
