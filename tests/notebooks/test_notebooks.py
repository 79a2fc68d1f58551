"""Every notebook runs from a clean kernel, and its two files say the same."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from theory_lab.models import cache_dir, find_model

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("jupytext")
pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
#: Packages without which a notebook is skipped, beyond those of the extras cli, plot and triton.
NEEDS: dict[str, tuple[str, ...]] = {"03_probe_your_model": ("transformers", "gguf")}
#: Known models that a notebook loads; where they are not in the cache it is skipped, since a test fetches nothing.
MODELS: dict[str, tuple[str, ...]] = {"03_probe_your_model": ("smollm2-135m",)}
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def _tool():
    spec = importlib.util.spec_from_file_location("notebooks_tool", ROOT / "tools" / "notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_notebooks_and_their_markdown_agree() -> None:
    """``make notebooks`` has nothing to do; it also takes outputs away."""
    assert [path.name for path in _tool().stale()] == []


def test_a_difference_is_found(tmp_path: Path) -> None:
    """An edited cell, an output left in, and a twin that is missing."""
    tool = _tool()
    source = (NOTEBOOKS[0].with_suffix(".md")).read_text(encoding="utf-8")
    names = ["1_edited", "2_output", "3_alone", "4_fine"]
    for name in names:
        markdown = tmp_path / f"{name}.md"
        markdown.write_text(source, encoding="utf-8")
        markdown.with_suffix(".ipynb").write_text(tool.build(markdown), encoding="utf-8")
    (tmp_path / "1_edited.md").write_text(source.replace("import", "import os, ", 1), encoding="utf-8")
    notebook = nbformat.read(tmp_path / "2_output.ipynb", as_version=4)
    code = next(cell for cell in notebook.cells if cell.cell_type == "code")
    code.outputs = [nbformat.v4.new_output("stream", text="left over")]
    nbformat.write(notebook, tmp_path / "2_output.ipynb")
    (tmp_path / "3_alone.md").unlink()
    assert [path.stem for path in tool.stale(tmp_path)] == names[:3]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_from_a_clean_kernel(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cell that fails, a warning, or a GPU; in an empty folder, so that it needs no file beside it."""
    for package in NEEDS.get(path.stem, ()):
        pytest.importorskip(package)
    models = MODELS.get(path.stem, ())
    for model in models:
        if not find_model(model).cached:
            pytest.skip(f"{model} is not in {cache_dir()}: theory-lab models fetch {model}")
    for name, value in {
        # Results of earlier runs would hide what a first run takes; models are what a cache is for.
        "THEORY_LAB_CACHE": str(cache_dir() if models else tmp_path / "cache"),
        # The tests share the cores: threads that wait for each other would take more time than they save.
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "JUPYTER_PLATFORM_DIRS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "empty"
    folder.mkdir()
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(folder)}})
    shell = [cell.source for cell in notebook.cells if cell.source.startswith("%%")]
    assert not shell, "jupytext makes a cell of a block of shell code that would run: mark it console"
    try:
        client.execute()
    finally:
        if os.environ.get("THEORY_LAB_KEEP_NOTEBOOKS"):  # to look at what came out
            nbformat.write(notebook, Path(os.environ["THEORY_LAB_KEEP_NOTEBOOKS"]) / path.name)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs
    said = "".join(output.text for output in outputs if output.get("name") == "stderr")
    assert "Warning" not in said, said
    assert notebook.cells[0].source.startswith("# ")
    assert any("change something" in cell.source for cell in notebook.cells[-3:]), "it ends with something to change"
