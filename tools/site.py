"""Hooks of the documentation site: pages that live outside docs/, their links, and the commands' own help.

A page keeps the links that work where its source lies. Here each is resolved against the repository; what it points at
is put into the site at the same place, and a link to nothing stops the build.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).resolve().parent.parent
#: What of the repository outside docs/ belongs to the site.
_GUESTS = (
    "figures/**/*.png",
    "figures/**/*.csv",
    "figures/**/*.pdf",
    "figures/**/*.tex",
    "figures/**/*.md",
    "experiments/*/measured/*.csv",
    "kernels/README.md",
    "kernels/*/README.md",
    "kernels/theory_kernels/**/*.md",
    "kernels/benchmarks/results/*",
    "benchmarks/README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
)
#: Where in the navigation a page of that folder goes if mkdocs.yml does not say.
_SECTIONS = {"how-to": "How to", "claims": "Claims", "api": "Reference", "decisions": "Decisions"}
_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^()\s]+)\)")
_HELP = re.compile(r"^<!-- help of every command -->$", re.MULTILINE)
_CODE = re.compile(r"(^(?:```|~~~).*?^(?:```|~~~)|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """Put pages that mkdocs.yml does not name where their like are: no page may be out of reach."""
    sections = {title: pages for entry in config.nav if isinstance(entry, dict) for title, pages in entry.items()}
    named = set(_named(config.nav))
    docs = Path(config.docs_dir)
    for path in [*sorted(docs.rglob("*.md")), _ROOT / "figures" / "README.md"]:
        name = path.relative_to(docs if path.is_relative_to(docs) else _ROOT).as_posix()
        if path.exists() and name not in named:
            sections[_SECTIONS.get(name.split("/")[0], "Figures")].append(name)
    return config


def _named(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [name for part in parts for name in _named(part)]


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and pictures that live outside docs/."""
    for pattern in _GUESTS:
        for path in sorted(_ROOT.glob(pattern)):
            name = path.relative_to(_ROOT).as_posix()
            if path.is_file() and files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links at where their targets lie in the site, and write out the commands' help."""
    pieces = _CODE.split(markdown)
    source = Path(page.file.abs_src_path).parent
    pieces[::2] = [_LINK.sub(lambda m: _resolve(m, source, page, files), piece) for piece in pieces[::2]]
    text = "".join(pieces)
    return _HELP.sub(lambda match: command_help(), text) if page.file.src_uri.startswith("api/") else text


def _resolve(match: re.Match[str], source: Path, page: Any, files: Files) -> str:
    label, target = match.groups()
    path, mark, anchor = target.partition("#")
    if not path or re.match(r"[a-z][a-z0-9+.-]*:", path):
        return match.group()
    where = (source / path).resolve()
    if not where.exists():
        raise PluginError(f"{page.file.src_uri}: the link {target} points at nothing")
    name = where.relative_to(_ROOT).as_posix()
    place = name.removeprefix("docs/")
    if files.get_file_from_path(place) is None:
        if where.is_dir() and files.get_file_from_path(f"{place}/README.md") is not None:
            place += "/README.md"
        elif label.startswith("!"):
            raise PluginError(f"{page.file.src_uri}: the picture {target} is not part of the site")
        else:
            # Source code, and folders that are only there in a checkout: named, not linked.
            return f"{label[1:-1]} (`{name}`)" if f"`{name}`" not in label and name not in label else label[1:-1]
    return f"{label}({posixpath.relpath(place, posixpath.dirname(page.file.src_uri))}{mark}{anchor})"


def command_help() -> str:
    """``--help`` of every command, as Markdown."""
    import click

    from theory_lab.cli import command

    context = click.Context(command, info_name="theory-lab")
    parts = []
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        if found is None or found.hidden:
            continue
        text = found.get_help(click.Context(found, info_name=f"theory-lab {name}", max_content_width=100))
        parts += [f"## theory-lab {name}", "", "```text", text, "```", ""]
    return "\n".join(parts)
