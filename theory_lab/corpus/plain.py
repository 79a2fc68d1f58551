"""Plain text from what documentation comes as: HTML, manual pages, Perl's POD."""

from __future__ import annotations

import re
from typing import Any

from theory_lab.errors import InputError

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_SPACE = re.compile(r"[ \t\r\n]+")


def clean(text: str) -> str:
    """Text with ``\\n`` for line ends, no control characters, no trailing blanks, no two empty lines in a row."""
    text = _CONTROL.sub("", text.replace("\r\n", "\n").replace("\r", "\n").replace("\u00ad", ""))
    lines = [line.rstrip() for line in text.split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


# HTML

_BLOCKS = frozenset(
    (
        *("address", "article", "aside", "blockquote", "body", "caption", "center", "dd", "details", "div", "dl", "dt"),
        *("fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr"),
        *("li", "main", "nav", "ol", "p", "pre", "section", "summary", "table", "tbody", "tfoot", "thead", "tr", "ul"),
    )
)
_DROPPED = frozenset(
    (
        *("script", "style", "head", "nav", "header", "footer", "template", "noscript", "svg", "math", "iframe"),
        *("button", "select"),
    )
)
#: Parts of a page that are about the page: navigation of Sphinx, DocBook and their like, and signs beside headings.
_FURNITURE = frozenset(
    (
        *("sphinxsidebar", "related", "headerlink", "navheader", "navfooter", "footer", "toc", "breadcrumbs", "docnav"),
        *("mobile-nav", "menu-wrapper", "indices-and-tables", "genindextable", "modindextable", "viewcode-link"),
    )
)


#: Stand for the beginning and the ends of lines of preformatted text, whose white space is to stay.
_VERBATIM, _LINE = "\ue002", "\ue003"


def from_html(raw: bytes | str) -> str:
    """The words of a page: its main part, without navigation; blocks apart, preformatted text as it stands."""
    try:
        from lxml import etree, html
    except ImportError:
        raise InputError("corpus", "lxml is not installed", "pip install 'theory-lab[corpus]' to read HTML") from None
    try:
        root = html.document_fromstring(raw, parser=html.HTMLParser(huge_tree=True))
    except (etree.ParserError, etree.XMLSyntaxError, ValueError):
        return ""  # nothing but white space, or comments
    for path in ('//*[@role="main"]', "//main", "//article", "//body"):
        found = root.xpath(path)
        if len(found) == 1:
            root = found[0]
            break
    parts: list[str] = []
    _walk(root, parts, pre=False)
    text = re.sub(r"[ \t]*\n[ \t]*\n[ \t\n]*", "\n\n", "".join(parts)).replace("\N{NO-BREAK SPACE}", " ")
    return clean(text.replace(_VERBATIM, "").replace(_LINE, "\n"))


def _walk(node: Any, parts: list[str], pre: bool) -> None:
    """Append the text of a node; tails belong to the parent."""
    # A stack in place of recursion: a damaged page can be nested thousands deep.
    todo: list[tuple[Any, bool, bool]] = [(node, pre, False)]
    while todo:
        item, inside, closing = todo.pop()
        if isinstance(item, str):
            parts.append(item.replace("\n", _LINE) if inside else _SPACE.sub(" ", item))
            continue
        tag = item.tag if isinstance(item.tag, str) else None
        if closing:
            parts.append("\n\n" if tag in _BLOCKS else "")
            continue
        if tag is None or tag in _DROPPED or _FURNITURE & set((item.get("class") or "").split()):
            continue
        within = inside or tag == "pre"
        if tag == "br":
            parts.append("\n")
        elif tag in _BLOCKS:
            parts.append("\n\n" + _VERBATIM if tag == "pre" else "\n\n")
        elif tag in ("td", "th"):
            parts.append(" ")
        todo.append((item, within, True))
        for child in reversed(item):
            if child.tail:
                todo.append((child.tail, within, False))
            todo.append((child, within, False))
        if item.text:
            todo.append((item.text, within, False))


# Manual pages

_ESCAPED = {
    "aq": "'", "cq": "'", "oq": "'", "dq": '"', "lq": '"', "rq": '"', "em": "--", "en": "-", "hy": "-", "bu": "*",
    "co": "(c)", "rs": "\\", "ti": "~", "ha": "^", "ga": "`", "mc": "u", "+-": "+-", "->": "->", "<=": "<=", ">=": ">=",
    "C+": "C++", "L\"": '"', "R\"": '"', "PI": "pi", "--": "--", "la": "<", "ra": ">", "dg": "+", "tm": "(TM)",
}  # fmt: skip
# Names end within a few letters: whatever opens one without an end would otherwise be searched to the end of the line.
_FONT = re.compile(r"\\f(\[[^]]{0,64}\]|\(..|.)|\\m(\[[^]]{0,64}\]|\(..|.)|\\s[-+]?\d+|\\s\([-+]?\d\d")
_SPECIAL = re.compile(r"\\\[([^]]{1,64})\]|\\\((..)|\\\*\[([^]]{1,64})\]|\\\*\((..)|\\\*(.)")
_ARGUMENT = re.compile(r'"((?:[^"]|"")*)"|((?:\\ |\S)+)')
#: Macros whose arguments are text, in fonts that plain text does not have.
_TEXT = frozenset(("B", "I", "R", "BR", "RB", "IB", "BI", "IR", "RI", "SM", "SB"))
_ALTERNATING = frozenset(("BR", "RB", "IB", "BI", "IR", "RI"))
_PARAGRAPH = frozenset(
    ("PP", "P", "LP", "IP", "TP", "HP", "SP", "sp", "br", "RS", "RE", "EX", "EE", "nf", "fi", "in", "Vb", "Ve", "TQ")
)
_MDOC = frozenset(("Nm", "Nd", "Fl", "Ar", "Pa", "Xr", "Dv", "Va", "Fn", "Em", "Sy", "Li", "Cm", "It", "Op"))


def from_man(text: str) -> str:
    """The words of a manual page in the ``man`` macros (and the common ones of ``mdoc``), without its formatting.

    Lines are joined to paragraphs, as a formatter would do, except for examples.
    """
    paragraphs: list[str] = []
    held: list[str] = []
    filling, skipping = True, False

    def end() -> None:
        if held:
            paragraphs.append((" " if filling else "\n").join(held))
            held.clear()

    for line in text.split("\n"):
        if skipping:  # the body of a macro definition
            skipping = line.strip() not in ("..", ".")
            continue
        if line.startswith(('.\\"', "'\\\"", ".\\#", "'")):
            continue
        if not line.startswith("."):
            if not line.strip() and filling:
                end()
            elif plain := _unescape(line):
                held.append(plain)
            continue
        name, _, rest = line[1:].strip().partition(" ")
        if name in ("de", "de1", "am", "ig"):
            skipping = True
        elif name in ("SH", "SS", "Sh", "Ss"):
            end()
            filling = True
            paragraphs.append(" ".join(_arguments(rest)))
        elif name in _TEXT:
            held.append(("" if name in _ALTERNATING else " ").join(_arguments(rest)))
        elif name in _PARAGRAPH:
            end()
            if name in ("nf", "EX", "Vb"):
                filling = False
            elif name in ("fi", "EE", "Ve"):
                filling = True
            if name == "IP" and rest:
                held.append(_arguments(rest)[0])
        elif name in _MDOC:
            held.append(" ".join(_arguments(rest)))
        elif name in ("UR", "MT"):
            held.append(_unescape(rest))
    end()
    return clean("\n\n".join(paragraphs))


def _arguments(rest: str) -> list[str]:
    return [_unescape((quoted or bare).replace('""', '"')) for quoted, bare in _ARGUMENT.findall(rest)] or [""]


def _unescape(text: str) -> str:
    if "\\" not in text:
        return text
    text = text.split('\\"')[0]
    text = _FONT.sub("", text)
    text = _SPECIAL.sub(_special, text)
    for sign, plain in (("\\-", "-"), ("\\ ", " "), ("\\~", " "), ("\\0", " "), ("\\e", "\\\0"), ("\\'", "'")):
        text = text.replace(sign, plain)
    text = re.sub(r"\\[&|^%:,/cdu)]|\\[hvw]'[^']{0,200}'", "", text)
    return re.sub(r"\\(?!\0)", "", text).replace("\\\0", "\\")


def _character(number: int) -> str:
    """The character of a number; nothing for one that is none, or half of a pair."""
    return chr(number) if number < 0xD800 or 0xE000 <= number < 0x110000 else ""


def _special(match: re.Match[str]) -> str:
    name = next(group for group in match.groups() if group is not None)
    if name.startswith("u") and re.fullmatch(r"u[0-9A-F]{4,6}", name):
        return _character(int(name[1:], 16))
    return _ESCAPED.get(name, "")


# POD

# A code of many brackets ends within a paragraph, for the same reason.
_POD = re.compile(r"([A-Z])(?:<<{1,8}\s++(.{0,1000}?)\s>>{1,8}|<([^<>]*)>)", re.DOTALL)
_ENTITIES = {"lt": "<", "gt": ">", "verbar": "|", "sol": "/", "amp": "&", "quot": '"'}


def from_pod(text: str) -> str:
    """The words of Perl's documentation, without its formatting codes and the code around it."""
    parts: list[str] = []
    inside, hidden = False, False
    for paragraph in re.split(r"\n[ \t]*\n", text.replace("\r\n", "\n")):
        command = re.match(r"\s*=([a-z]+\d?)\s*(.*)", paragraph, re.DOTALL)
        if command:
            name, rest = command[1], command[2]
            inside = name != "cut"
            hidden = name in ("begin", "for") or (hidden and name != "end")
            if name.startswith(("head", "item")) and not hidden and rest.strip() not in ("*", ""):
                parts.append(_codes(rest))
        elif inside and not hidden:
            parts.append(paragraph if paragraph.startswith((" ", "\t")) else _codes(paragraph))
    return clean("\n\n".join(part.strip("\n") for part in parts))


def _codes(text: str) -> str:
    for _ in range(8):  # codes nest, and the innermost go first
        text, changed = _POD.subn(_code, text)
        if not changed:
            break
    return text.replace("\ue000", "<").replace("\ue001", ">")


def _code(match: re.Match[str]) -> str:
    kind, inner = match[1], match[2].rstrip() if match[2] is not None else match[3]
    if kind in "XZ":
        return ""
    if kind == "E":
        if inner in _ENTITIES:
            # Kept out of the way of the codes around it, whose brackets are still to be read.
            return {"<": "\ue000", ">": "\ue001"}.get(_ENTITIES[inner], _ENTITIES[inner])
        return _character(int(inner)) if re.fullmatch(r"[0-9]{1,7}", inner) else ""
    if kind == "L":
        return inner.partition("|")[0]
    return inner
