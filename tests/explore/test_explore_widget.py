"""The explorer as a notebook's widget: the kernel's side of it."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

import numpy as np
import pytest
from made_captures import made

pytest.importorskip("anywidget")

from theory_lab.explore import explore, static_files


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    from theory_lab.explore.widget import ExplorerWidget

    monkeypatch.setattr(ExplorerWidget, "send", lambda self, content, buffers=None: found.append((content, buffers)))
    return found


def test_questions_are_answered_over_the_channel(sent: list[tuple[Any, Any]]) -> None:
    captured = made()
    widget = explore(captured, as_="tra")
    ask = {"pane": "p0", "layer": "1", "head": "2", "rows": "0,60", "columns": "0,60", "resolution": "16",
           "reduce": "sum", "quality": "quick"}  # fmt: skip
    widget._handle_custom_msg({"id": "1-x", "kind": "map", "parameters": ask}, [])
    (content, buffers) = sent.pop()
    assert content["id"] == "1-x"
    image = np.frombuffer(buffers[0], "<f4").reshape(content["header"]["shape"])
    np.testing.assert_array_equal(image, captured.map(1, 2, resolution=16, reduce="sum").image)
    widget._handle_custom_msg({"id": "2-y", "kind": "map", "parameters": {**ask, "head": "9"}}, [])
    (content, buffers) = sent.pop()
    assert content == {"id": "2-y", "error": "head: 9; heads 0 to 3 of layer 1 are allowed"}
    widget._handle_custom_msg("noise", [])
    assert not sent


def test_the_module_is_the_pages_own_in_one() -> None:
    text = static_files.module()
    assert "import " not in re.sub(r"//.*", "", text)
    assert re.findall(r"^export .*", text, re.MULTILINE) == ["export default { render };"]
    # Names of different modules share one scope.
    names = re.findall(r"^(?:async )?(?:function|class|const|let) (\w+)", text, re.MULTILINE)
    assert len(names) == len(set(names))


def test_the_module_is_good_javascript() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    done = subprocess.run(
        [node, "--check", "--input-type=module", "-"], input=static_files.module(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
