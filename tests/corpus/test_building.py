"""Corpora: what goes in comes out, the same each time; splits share nothing; bad input is named."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("tokenizers")

from click.testing import CliRunner  # after the check for tokenizers

from theory_lab.cli import command  # after the check for tokenizers
from theory_lab.corpus import Corpus  # after the check for tokenizers
from theory_lab.corpus.building import Plan, build_corpus  # after the check for tokenizers
from theory_lab.errors import InputError, StoreError  # after the check for tokenizers
from theory_lab.tasks import Source, open_source  # after the check for tokenizers

FILES = ("manifest.json", "tokenizer.json", "train.bin", "validation.bin", "train.documents.npy")


@pytest.fixture(scope="module")
def built(texts, tmp_path_factory) -> Corpus:
    plan = Plan(sources=[str(texts)], vocabulary=400, validation=0.1, license="public domain")
    return build_corpus(tmp_path_factory.mktemp("built") / "small", plan)


def documents(corpus: Corpus, split: str) -> list[str]:
    tokens, tokenizer = corpus.tokens(split).astype(int), corpus.tokenizer()
    starts = [*corpus.documents(split), len(tokens)]
    pieces = [tokens[a:b].tolist() for a, b in itertools.pairwise(starts)]
    assert all(piece[-1] == 1 and not {0, 1, 2} & set(piece[:-1]) for piece in pieces)
    return [tokenizer.decode(piece[:-1]) for piece in pieces]


def test_every_document_is_in_one_split_word_for_word(built, texts):
    train, validation = documents(built, "train"), documents(built, "validation")

    def read(file):
        return file.read_text(encoding="utf-8")

    original = sorted(map(read, texts.iterdir()))
    assert sorted(train + validation) == original
    assert validation
    assert train == [text for text in map(read, sorted(texts.iterdir())) if text in train], (
        "in the order of their names"
    )


def test_the_manifest_says_what_is_there(built):
    manifest = built.manifest
    source = manifest["sources"][0]
    assert (source["kind"], source["license"], source["documents"]) == ("folder", "public domain", 12)
    assert len(source["sha256"]) == 64
    for split, count in manifest["splits"].items():
        raw = (built.path / f"{split}.bin").read_bytes()
        assert count["sha256"] == hashlib.sha256(raw).hexdigest()
        assert count["tokens"] * 2 == len(raw)
        assert count["documents"] == len(built.documents(split))
        text = documents(built, split)
        assert count["characters"] == sum(map(len, text))
        assert count["bytes"] == sum(len(part.encode()) for part in text)
    assert sum(count["tokens"] for count in manifest["splits"].values()) == source["tokens"]
    share = manifest["splits"]["validation"]["characters"] / source["characters"]
    assert 0 < share <= 0.2
    assert built.vocab_size == manifest["tokenizer"]["vocab_size"] == 400
    assert not list(built.path.parent.glob(".small-*"))


def test_the_same_text_gives_the_same_bytes(built, texts, tmp_path):
    again = build_corpus(tmp_path / "small", Plan(sources=[str(texts)], vocabulary=400, validation=0.1,
                                                  license="public domain"))  # fmt: skip
    for name in FILES:
        assert (built.path / name).read_bytes() == (again.path / name).read_bytes(), name


def test_digits_are_tokens_of_their_own_and_bos_comes_first(built):
    tokenizer = built.tokenizer()
    assert [tokenizer.id_to_token(number) for number in range(3)] == ["<bos>", "<eos>", "<pad>"]
    tokens = tokenizer.encode("in 1984").tokens
    assert tokens[0] == "<bos>"
    assert tokens[-4:] == list("1984")


def test_crops_are_a_pure_function_of_seed_and_step(built):
    source = built.source("train", seed=5)
    assert isinstance(source, Source)
    tokens, labels = source.batch(2, 8, 33)
    np.testing.assert_array_equal(tokens, labels)
    assert tokens is not labels
    assert (tokens[:, 0] == 0).all()
    text = built.tokens("train").astype(np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(text, 32)
    for row in tokens:
        assert (windows == row[1:]).all(axis=1).any()
    np.testing.assert_array_equal(open_source(built.path, 5).batch(2, 3, 33)[0], tokens[:3])
    for other in (source.batch(3, 8, 33), built.source("train", 6).batch(2, 8, 33)):
        assert (other[0] != tokens).any()
    assert source.describe()["sha256"] == built.manifest["splits"]["train"]["sha256"]
    assert open_source(f"corpus:{built.path}", split="validation").vocab_size == 400


def test_windows_lie_side_by_side(built):
    text = built.tokens("validation")
    windows = built.windows("validation", 17)
    assert (windows[:, 0] == 0).all()
    np.testing.assert_array_equal(windows[:, 1:].reshape(-1), text[: 16 * len(windows)])
    assert len(text) - 16 * len(windows) < 16
    some = built.windows("validation", 17, 3)
    assert len(some) == 3
    assert all((windows == row).all(axis=1).any() for row in some)


def test_one_document_is_cut_in_two(tmp_path, passages):
    file = tmp_path / "book.txt"
    file.write_text("\n\n".join(passages), encoding="utf-8")
    corpus = build_corpus(tmp_path / "out", Plan(sources=[str(file)], validation=0.1))
    assert 300 < corpus.vocab_size <= 2048, "as many as the text has, where nobody says"
    (train,), (validation,) = documents(corpus, "train"), documents(corpus, "validation")
    assert "".join((train, validation)) == file.read_text(encoding="utf-8")
    assert 0.02 < len(validation) / len(train) < 0.3


def test_repetitions_are_left_out_and_counted(tmp_path, texts):
    folder = tmp_path / "twice"
    shutil.copytree(texts, folder)
    (folder / "again.txt").write_bytes((texts / "00.txt").read_bytes())
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    corpus = build_corpus(tmp_path / "out", Plan(sources=[str(folder)], vocabulary=300))
    source = corpus.manifest["sources"][0]
    assert (source["documents"], source["kept_documents"], source["skipped"]) == (13, 12, 1)
    assert corpus.manifest["left_out"]["documents"] == 1


def test_a_limit_of_tokens_is_kept(tmp_path, texts, built):
    most = built.manifest["sources"][0]["tokens"] // 2
    corpus = build_corpus(tmp_path / "out", Plan(sources=[str(texts)], vocabulary=400, validation=0.2, max_tokens=most))
    tokens = sum(count["tokens"] for count in corpus.manifest["splits"].values())
    assert 0.5 * most < tokens <= most


def test_json_lines_and_packed_files(tmp_path, passages):
    lines = "\n".join(json.dumps({"body": part, "id": number}) for number, part in enumerate(passages))
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    plan = Plan(sources=[str(tmp_path / "rows.jsonl.gz")], vocabulary=300, column="body")
    corpus = build_corpus(tmp_path / "out", plan)
    assert corpus.manifest["sources"][0]["documents"] == len(passages)
    with pytest.raises(InputError, match=r"line 1; a JSON object with text under 'text'"):
        build_corpus(tmp_path / "other", Plan(sources=[str(tmp_path / "rows.jsonl.gz")], vocabulary=300))


def test_data_sets_are_streamed(tmp_path, passages, monkeypatch):
    """With a stand-in for the Hub: what is asked of it, and how its rows become documents."""
    datasets = pytest.importorskip("datasets")
    asked, read = [], []

    class Rows(datasets.IterableDataset):
        def __init__(self):
            self._info = datasets.DatasetInfo(license="odc-by")
            self._split = None

        def __iter__(self):
            for number, part in enumerate([*passages, *passages]):
                read.append(number)
                yield {"text": part + f" {number}", "url": ""}

    def load(name, config, *, split, streaming):
        asked.append((name, config, split, streaming))
        return Rows()

    monkeypatch.setattr(datasets, "load_dataset", load)
    plan = Plan(sources=["owner/name"], vocabulary=300, config="sample", max_tokens=2000, validation=0.2)
    corpus = build_corpus(tmp_path / "out", plan)
    assert asked == [("owner/name", "sample", "train", True)]
    assert len(read) < 2 * len(passages), "no more is read than is needed"
    source = corpus.manifest["sources"][0]
    assert (source["kind"], source["name"], source["license"]) == ("dataset", "owner/name/sample", "odc-by")
    with pytest.raises(InputError, match="column: body; owner/name has text, url"):
        build_corpus(tmp_path / "b", Plan(sources=["owner/name"], vocabulary=300, column="body"))

    def missing(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", missing)
    with pytest.raises(InputError, match=r"cannot be opened as a data set .*no network"):
        build_corpus(tmp_path / "c", Plan(sources=["owner/name"], vocabulary=300))


def test_a_local_folder_of_a_data_set_is_read_by_the_package(tmp_path, passages):
    pytest.importorskip("datasets")
    from theory_lab.corpus.hub import read_dataset

    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(json.dumps({"text": part}) for part in passages[:3]))
    origin, found = read_dataset(str(folder))
    assert [document.text for document in found] == passages[:3]
    assert origin.documents == 3


def packed(text: bytes) -> bytes:
    """A window of Unix ``compress`` without its magic number: every byte a code of nine bits."""
    assert len(text) < 250
    bits = "".join(format(byte, "09b")[::-1] for byte in text)
    bits += "0" * (-len(bits) % 8)
    return bytes(int(bits[at : at + 8][::-1], 2) for at in range(0, len(bits), 8))


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb, of Debian")
def test_debian_packages_become_documents(tmp_path, passages):
    def package(name: str, files: dict[str, bytes]) -> None:
        root = tmp_path / name
        (root / "DEBIAN").mkdir(parents=True)
        (root / "DEBIAN/control").write_text(
            f"Package: {name}\nVersion: 4.5\nArchitecture: all\nMaintainer: A <a@b.c>\nDescription: none\n"
        )
        for place, content in files.items():
            (root / place).parent.mkdir(parents=True, exist_ok=True)
            (root / place).write_bytes(content)
        subprocess.run(["dpkg-deb", "-b", root, tmp_path / f"{name}_4.5_all.deb"], check=True, capture_output=True)

    pages = {
        f"usr/share/man/man1/p{number}.1.gz": gzip.compress(f".TH P 1\n.SH NAME\n{part}\n".encode())
        for number, part in enumerate(passages[:40])
    }
    package("manpages", {**pages, "usr/share/doc/manpages/copyright": b"free", "usr/share/doc/x.txt": b"not taken"})
    verses = [b"Ge1:1 In the beginning of a text that is long enough to stay.\n", b"Ex1:1 And another one, as long as "
              b"the first one was, or so it seems.\n"]  # fmt: skip
    windows = [packed(verse) for verse in verses]
    table = struct.pack(">IIII", 65536, 2, 0x64, 0x64 + len(windows[0]))
    package("bible-kjv-text", {"usr/lib/bible.data": b"\0" * 0x54 + table + b"".join(windows)})
    plan = Plan(debian=("bible-kjv-text", "manpages"), debs=tmp_path, vocabulary=300)
    corpus = build_corpus(tmp_path / "out", plan)
    bible, manpages = corpus.manifest["sources"]
    assert (bible["kind"], bible["version"], bible["documents"]) == ("debian", "4.5", 2)
    assert bible["license"].startswith("public domain")
    assert manpages["documents"] == 40
    deb = (tmp_path / "manpages_4.5_all.deb").read_bytes()
    assert manpages["sha256"] == hashlib.sha256(deb).hexdigest()
    assert (corpus.path / "licenses/manpages.txt").read_text() == "free"
    everything = documents(corpus, "train") + documents(corpus, "validation")
    assert any("In the beginning of a text" in text for text in everything)
    with pytest.raises(InputError, match="it has no perl-doc_"):
        build_corpus(tmp_path / "b", Plan(debian=("perl-doc",), debs=tmp_path, vocabulary=300))


def test_dictionaries_become_documents_of_a_size():
    from theory_lab.corpus.debian import PACKAGES

    line = b"00001740 03 n 02 entity 0 living_thing 0 003 ~ 00001930 n 0000 | that which is there  \n"
    notes = b"  1 This software and database is being provided\n"
    found = list(PACKAGES["wordnet-base"].reader("wordnet", notes + line * 800))
    assert found[0].text.startswith("entity, living thing: that which is there\n\nentity")
    assert len(found) == 2
    assert abs(len(found[0].text) - 20_000) < 100


@pytest.mark.parametrize(
    ("content", "change", "message"),
    [
        (b"", {}, "it is empty, or no text"),
        (b"\x7fELF\0\0\0", {}, "it is empty, or no text"),
        (b"a few words\n", {"vocabulary": 8192}, "vocab: 8192; the text has pieces for"),
        (b"words", {"vocabulary": 258}, "vocab: 258; a whole number from 259"),
        (b"words", {"validation": 0.0}, "validation: 0.0"),
        (b"words", {"max_tokens": 5}, "max-tokens: 5"),
        (b"words", {"sources": ()}, "files, folders, data sets"),
        (b"words", {"sources": ("no/such/file",)}, "source: no/such/file; a file, a folder"),
        (b"words", {"debian": ("perl",)}, "did you mean 'perl-doc'"),
    ],
)
def test_bad_input_is_named_and_nothing_is_left(tmp_path, content, change, message):
    file = tmp_path / "file.txt"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message):
        build_corpus(tmp_path / "out", Plan(**{"sources": [str(file)], **change}))
    assert [path.name for path in tmp_path.iterdir()] == ["file.txt"]


def test_places_that_cannot_take_a_corpus(tmp_path, texts):
    plan = Plan(sources=[str(texts)], vocabulary=300)
    with pytest.raises(InputError, match="a new or empty folder"):
        build_corpus(texts, plan)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no text was found"):
        build_corpus(tmp_path / "out", Plan(sources=[str(tmp_path / "empty")], vocabulary=300))
    with pytest.raises((StoreError, InputError)):
        build_corpus("/proc/none/there", plan)


def test_a_full_disk_leaves_nothing(tmp_path, texts, monkeypatch):
    import errno

    from theory_lab.corpus import building

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(building.os, "fsync", full)
    with pytest.raises(StoreError, match="the disk is full"):
        build_corpus(tmp_path / "out", Plan(sources=[str(texts)], vocabulary=300))
    assert not list(tmp_path.iterdir())


def test_damaged_corpora_are_refused(built, tmp_path):
    def damaged(name, content):
        copy = tmp_path / f"copy-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(built.path, copy)
        (copy / name).write_bytes(content)
        return copy

    with pytest.raises(InputError, match=r"train\.bin is missing or incomplete"):
        Corpus.open(damaged("train.bin", b"\0\0"))
    with pytest.raises(InputError, match=r"manifest\.json is damaged"):
        Corpus.open(damaged("manifest.json", b"{"))
    with pytest.raises(InputError, match="format 99"):
        Corpus.open(damaged("manifest.json", json.dumps({**built.manifest, "format": 99}).encode()))
    with pytest.raises(InputError, match=r"no manifest\.json"):
        Corpus.open(tmp_path)
    with pytest.raises(InputError, match=r"documents\.npy is damaged"):
        Corpus.open(damaged("train.documents.npy", b"x")).documents("train")
    with pytest.raises(InputError, match="cannot be read"):
        Corpus.open(damaged("tokenizer.json", b"x")).tokenizer()
    with pytest.raises(InputError, match="split: test"):
        built.tokens("test")
    with pytest.raises(InputError, match="fewer than a batch of 4,096 sequences"):
        built.source().batch(0, 4096, 64)
    with pytest.raises(InputError, match="windows of that length"):
        built.windows("validation", 10**6)


def test_the_commands(texts, tmp_path):
    out = tmp_path / "corpus"
    done = CliRunner().invoke(
        command, ["corpus", "build", str(texts), "--out", str(out), "--vocab", "300", "--license", "PD", "--quiet"]
    )
    assert done.exit_code == 0, done.output
    assert "characters a token" in done.output
    shown = CliRunner().invoke(command, ["corpus", "show", str(out), "--format", "json"])
    assert json.loads(shown.output)["sources"][0]["license"] == "PD"
    wrong = CliRunner().invoke(command, ["corpus", "build", str(texts), "--out", str(out), "--debs", "x"])
    assert "it goes with --debian" in str(wrong.exception)


def test_an_interrupted_build_leaves_nothing(tmp_path, texts, monkeypatch):
    from theory_lab.corpus import building

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(building, "_encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build_corpus(tmp_path / "out", Plan(sources=[str(texts)], vocabulary=300))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("package", "source", "message"),
    [
        ("tokenizers", "page.txt", r"tokenizers is not installed; pip install 'theory-lab\[corpus\]'"),
        ("lxml", "page.html", r"lxml is not installed; pip install 'theory-lab\[corpus\]'"),
        ("datasets", "owner/name", r"pip install 'theory-lab\[hub\]'"),
    ],
)
def test_missing_packages_are_named(tmp_path, monkeypatch, package, source, message):
    monkeypatch.setitem(sys.modules, package, None)
    for name in ("page.txt", "page.html"):
        (tmp_path / name).write_text("<p>" + "some words that make a text " * 20)
    place = source if "/" in source else str(tmp_path / source)
    with pytest.raises(InputError, match=message):
        build_corpus(tmp_path / "out", Plan(sources=[place]))
    assert not (tmp_path / "out").exists()
