"""The documentation: its links lead somewhere, its Python runs, its commands exist and mean what they say.

Python blocks are executed, page by page. A shell block that is followed by a block of output is executed, and must
print every line of it; of other shell lines each command is parsed, with all the checks that come before work begins,
and not run. A block below the comment ``<!-- not run: REASON -->`` is left alone.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "kernels" / "README.md", *(ROOT / "docs").rglob("*.md")])
_BLOCK = re.compile(r"(<!-- not run: [^>]+ -->\n+)?^```(\w*)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)

#: What a page takes for granted: names that its text introduces, made here.
GIVEN = {
    "docs/mechanisms.md": """
import torch
from theory_lab.attention import Mechanism, register
q, q2 = torch.randn(2, 1, 4, 12, 64)
k, k2, v = torch.randn(3, 1, 2, 12, 64)
not_padding = torch.ones(1, 12, dtype=torch.bool)
cosines, cosines2 = torch.rand(2, 1, 4, 12, 12) * 2 - 1
""",
    "docs/models.md": """
from pathlib import Path
import torch
import theory_lab.models
from transformers import LlamaConfig, LlamaForCausalLM
from theory_kernels import attention_statistics
from theory_lab.models.loading import LoadedModel
tiny = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
tiny = LlamaForCausalLM(tiny).eval()
inputs = {"input_ids": torch.arange(12)[None]}
# The page's model is a download of 90 MB.
theory_lab.models.load_model = lambda name, **more: LoadedModel(tiny, None, name, 2, 2, 2, 8, 64, True, Path("."))
""",
    "kernels/README.md": """
import torch
q, k, v = torch.randn(3, 1, 2, 96, 16)
""",
    "docs/results.md": """
from pathlib import Path
import theory_lab
from theory_lab.store.compact import compact
for name in ("first", "large"):
    theory_lab.check("tda-4.3", noise="gaussian", length=64, trials=1000, out=f"results/{name}", workers=1)
compact(Path("results/large"))
""",
}


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    skipped: bool
    output: str


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = list(_BLOCK.finditer(text))
    result = []
    for match, after in itertools.zip_longest(found, found[1:]):
        adjacent = after is not None and not text[match.end() : after.start()].strip() and after[2] == "text"
        result.append(Block(match[2], match[3], match[1] is not None, after[3] if adjacent and after else ""))
    return result


def pages_with(language: str) -> list[Path]:
    return [page for page in PAGES if any(b.language == language for b in blocks(page))]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the pages speak of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    np.save(tmp_path / "scores.npy", np.random.default_rng(0).normal(0, 0.11, 5000))
    (tmp_path / "book.txt").write_text("Call me Ishmael. " * 500)
    (tmp_path / "results").mkdir()
    return tmp_path


@pytest.mark.parametrize("page", pages_with("python"), ids=name)
def test_python_runs(page: Path, desk: Path) -> None:
    import torch

    space: dict[str, object] = {"__name__": "__page__"}
    exec(GIVEN.get(name(page), ""), space)
    ran = 0
    try:
        for block in blocks(page):
            on_gpu = '"cuda"' in block.code and not torch.cuda.is_available()
            if block.language == "python" and not block.skipped and not on_gpu:
                with contextlib.redirect_stdout(io.StringIO()):
                    exec(compile(block.code, name(page), "exec"), space)
                ran += 1
    finally:
        _forget()
    if not ran:
        pytest.skip("its blocks need a GPU, or say why they are not run")


def _forget() -> None:
    """Undo what pages do to the packages: a mechanism registered, a loader replaced."""
    import theory_lab.models
    from theory_lab.attention import list_mechanisms, unregister

    theory_lab.models.__dict__.pop("load_model", None)
    if "uniform" in list_mechanisms():
        unregister("uniform")


def commands(code: str) -> list[list[str]]:
    """Lines of a shell block as words, without comments, redirections and pipes."""
    found = []
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        ends = [i for i, word in enumerate(words) if word in ("|", ">", "2>", "||", "&&")]
        if words:
            found.append(words[: min(ends, default=len(words))])
    return found


def context_of(words: list[str]) -> click.Context:
    from theory_lab.cli import command

    found: click.Command | None = command
    context = click.Context(command, info_name="theory-lab")
    while isinstance(found, click.Group) and (words or not found.invoke_without_command):
        assert words, "a command is missing"
        found, words = found.get_command(context, words[0]), words[1:]
    assert found is not None
    return found.make_context(found.name, list(words), parent=context)


def run_line(words: list[str]) -> str:
    context = context_of(words)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(click.exceptions.Exit), context:
        context.command.invoke(context)
    return out.getvalue()


@pytest.mark.parametrize("page", pages_with("sh"), ids=name)
def test_commands_exist_and_mean_what_they_say(page: Path, desk: Path) -> None:
    from theory_lab.cli import _settings
    from theory_lab.experiments import build_cases, build_pieces

    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for block in blocks(page):
        if block.language != "sh" or block.skipped:
            continue
        for words in commands(block.code):
            if words[0] == "make":
                assert set(words[1:]) <= set(targets), words
            elif words[0] == "theory-lab":
                context = context_of(words[1:])
                if context.info_name == "check":
                    settings = _settings(context.params)
                    assert build_cases(settings) or build_pieces(settings)
            else:
                assert words[0] in ("source", "pip", "eval", "pdflatex", "pre-commit"), words


@pytest.mark.parametrize(
    ("page", "block"),
    [pytest.param(p, b, id=f"{name(p)}-{i}") for p in PAGES for i, b in enumerate(blocks(p))
     if b.language == "sh" and b.output and not b.skipped and "theory-lab" in b.code],
)  # fmt: skip
def test_printed_output_is_what_is_printed(page: Path, block: Block, desk: Path) -> None:
    printed = "".join(run_line(words[1:]) for words in commands(block.code))
    lines = {" ".join(line.split()) for line in printed.splitlines()}
    for line in block.output.splitlines():
        if line.strip() and line.strip() != "[...]":
            assert " ".join(line.split()) in lines, line


_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", re.sub(r"[`*]|\]\([^)]*\)", "", head)).strip().lower() for head in heads]
    return {re.sub(r"[ -]+", "-", head) for head in plain}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```|`[^`\n]+`", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in _LINK.findall(text):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            assert target.startswith("https://"), target
            continue
        where = (page.parent / path).resolve() if path else page
        assert where.is_relative_to(ROOT), target
        assert where.exists(), target
        if anchor:
            assert anchor in anchors(where), target


def test_every_claim_has_a_page() -> None:
    from theory_lab.catalog import CATALOG

    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "claims").glob("*.md"))
    assert not [claim for claim in CATALOG if f"{claim}" not in text]
