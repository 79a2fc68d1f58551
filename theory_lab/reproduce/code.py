"""The version of the code that computes or draws something: a digest over a module and all that it imports of ours.

Comments, docstrings and layout do not count, so that a result stays fresh until what computes it changes.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

_PACKAGES = {
    "theory_lab": Path(__file__).resolve().parent.parent,
    "theory_kernels": Path(__file__).resolve().parent.parent.parent / "kernels" / "theory_kernels",
}
#: Words, wiring, files, and faster ways to the same numbers: they change none. Lists of everything would make every
#: result depend on everything.
_STOP = {"theory_kernels"} | frozenset(
    f"theory_lab{name}"
    for name in (
        "", ".catalog", ".cli", ".commands", ".engine", ".errors", ".experiments", ".figures", ".main", ".progress",
        ".render", ".settings", ".store", ".studies", ".attention", ".attention.registry", ".attention.fast",
        ".models.fetching", ".models.progress", ".reproduce", ".reproduce.cache", ".reproduce.kinds",
        ".reproduce.needs", ".reproduce.run", ".reproduce.spec", ".audit", ".estimation.device", ".noise.model_scores",
    )
)  # fmt: skip


def code_digest(names: Iterable[str], within: str = "") -> str:
    """16 hexadecimal digits over the code of these modules and of every module of ours that they import.

    Parameters
    ----------
    names : iterable of str
        Dotted names, such as ``theory_lab.phase``; one that does not exist counts as empty.
    within : str
        A package; only imports from it are followed.
    """
    text = "\n".join(f"{name} {_read(name)[0]}" for name in sorted(modules(names, within)))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def modules(names: Iterable[str], within: str = "") -> set[str]:
    """These modules, and every module of ours that they import, directly or not."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [other for other in _read(name)[1] if _counts(other, within)]
    return found


def _counts(name: str, within: str) -> bool:
    # A result that can draw itself does not depend on its picture.
    return name.startswith(within) if within else name not in _STOP and not name.startswith("theory_lab.figures")


@cache
def _read(name: str) -> tuple[str, tuple[str, ...]]:
    """A module's digest, and the modules of ours that it imports anywhere."""
    path = _path(name)
    if path is None:
        return "", ()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    imports: set[str] = set()
    for node in _running(tree):
        if isinstance(node, ast.Import):
            imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], *base.split(".")])
            base = base.strip(".")
            # ``from package import module`` names a module; ``from module import thing`` does not.
            imports.update(f"{base}.{alias.name}" for alias in node.names if _path(f"{base}.{alias.name}"))
            imports.add(base)
    ours = tuple(sorted(module for module in imports if module.split(".")[0] in _PACKAGES and _path(module)))
    return hashlib.blake2b(repr(_shape(tree)).encode(), digest_size=16).hexdigest(), ours


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes of what can run: imports for the type checker alone change nothing."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING"):
            yield from _running(child)


@cache
def _path(name: str) -> Path | None:
    head, *rest = name.split(".")
    folder = _PACKAGES.get(head)
    if folder is None:
        return None
    base = folder.joinpath(*rest)
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file() and (rest or path.name == "__init__.py"):
            return path
    return None


def _shape(node: object) -> object:
    """The syntax tree as nested tuples, without docstrings and positions; the same for every Python version."""
    if isinstance(node, ast.AST):
        fields = []
        for name, value in ast.iter_fields(node):
            if name == "body" and isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                value = value[1:] if value and _is_text(value[0]) else value
            if value is not None and value != []:
                fields.append((name, _shape(value)))
        return (type(node).__name__, *fields)
    if isinstance(node, list):
        return tuple(_shape(item) for item in node)
    return node


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
