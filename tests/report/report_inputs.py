"""Texts that a report must survive, and a reader of pages."""

from __future__ import annotations

from html.parser import HTMLParser

#: Texts that would act on a page, a document or a terminal if they were let.
HOSTILE = (
    "<script>document.title='owned'</script>",
    "\"><img src=x onerror=document.title='owned'>",
    "</td></table><h1>out</h1>",
    "javascript:alert(1)",
    "| pipe | `tick` [link](http://example.invalid) <b>",
    r"\input{/etc/passwd} $x^2$ % & # _ ~ {",
    "line\nbreak\ttab\x00nul\u202eright-to-left\ud800half",
    "\u4e2d\u6587 \U0001f600 e\u0301",
    "{{ 7 * 7 }} {% raw %}",
    "'; DROP TABLE rows; --",
)


class Page(HTMLParser):
    """Elements, their attributes, and the text of table cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.blocks: dict[str, str] = {}
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = tag
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = "td" if tag == "a" and self._open == "a" else ""

    def handle_data(self, data: str) -> None:
        if self._open in ("td", "a") and self.cells:
            self.cells[-1] += data
        if self._open in ("script", "style"):
            self.blocks[self._open] = self.blocks.get(self._open, "") + data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]
