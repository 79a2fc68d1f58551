"""The explorer in headless Chromium: it draws, zooms, opens heads, reads values aloud, and runs nothing hostile."""

from __future__ import annotations

import base64
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
import torch
from made_captures import HOSTILE, made

from theory_lab.explore import static_files
from theory_lab.explore.server import ExplorerServer, serve_in_background
from theory_lab.explore.session import Session, open_session
from theory_lab.probes import Captured

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver"),
]

from selenium.webdriver.common.actions.wheel_input import ScrollOrigin  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.select import Select  # noqa: E402

TOKENS = 300


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (
        "headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
        "disable-component-update", "disable-sync", "window-size=1400,1000",
        f"user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):  # fmt: skip
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def server() -> Iterator[ExplorerServer]:
    captured = made(tokens=TOKENS)
    running = serve_in_background(Session([captured], ["tda:beta=0.3"]))
    yield running
    running.shutdown()
    running.server_close()


def until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """What the condition gives once it is true; the machine may be slow."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("it never came")


# What a canvas shows, as (red + green + blue) of every eighth point of its plot: enough to see it change.
_PRINT = """
const canvas = document.querySelectorAll('.tl-map')[arguments[0]];
const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
let sum = 0; const colors = new Set();
for (let i = 0; i < data.length; i += 32) {
  sum = (sum * 31 + data[i] + data[i + 1] * 3 + data[i + 2] * 7) % 1000000007;
  colors.add(`${data[i]},${data[i + 1]},${data[i + 2]}`);
}
return [sum, colors.size];
"""


class Page:
    def __init__(self, browser: Any) -> None:
        self.browser = browser

    def open(self, url: str) -> None:
        self.browser.get_log("browser")
        self.browser.get(url)
        until(lambda: len(self.browser.find_elements(By.CSS_SELECTOR, ".tl-map")))
        until(lambda: self.colors() > 10)

    def print(self, pane: int = 0) -> tuple[int, int]:
        sum_, colors = self.browser.execute_script(_PRINT, pane)
        return sum_, colors

    def colors(self, pane: int = 0) -> int:
        return self.print(pane)[1]

    def settled(self, pane: int = 0) -> tuple[int, int]:
        """What is shown once it has stayed the same for half a second."""
        before, since = self.print(pane), time.monotonic()
        while time.monotonic() - since < 0.5:
            now = self.print(pane)
            if now != before:
                before, since = now, time.monotonic()
            time.sleep(0.05)
        return before

    def one(self, selector: str) -> Any:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def status(self) -> str:
        return self.one(".tl-status").text

    def point(self, u: float, v: float, pane: int = 0) -> None:
        """Move the mouse to a place of the plot, 0 to 1 across and down."""
        canvas = self.browser.find_elements(By.CSS_SELECTOR, ".tl-map")[pane]
        size = canvas.size
        plot = size["width"] - 84 - 44
        x, y = 84 + u * plot - size["width"] / 2, 72 + v * plot - size["height"] / 2
        webdriver.ActionChains(self.browser).move_to_element_with_offset(canvas, int(x), int(y)).perform()

    def wheel(self, u: float, v: float, by: int) -> None:
        self.point(u, v)
        canvas = self.one(".tl-map")
        size = canvas.size
        plot = size["width"] - 84 - 44
        origin = ScrollOrigin.from_element(
            canvas, int(84 + u * plot - size["width"] / 2), int(72 + v * plot - size["height"] / 2)
        )
        webdriver.ActionChains(self.browser).scroll_from_origin(origin, 0, by).perform()

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.browser.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.fixture
def page(browser: Any, server: ExplorerServer) -> Page:
    made = Page(browser)
    made.open(server.url)
    return made


def test_click_zoom_and_hover(page: Page) -> None:
    assert len(page.browser.find_elements(By.CSS_SELECTOR, ".tl-thumb")) == 12
    assert [one.text for one in page.browser.find_elements(By.CSS_SELECTOR, ".tl-pane h2")] == [
        "the model's own", "view 1", "view 2", "difference, tda:beta=0.3",
    ]  # fmt: skip
    first = page.settled()
    # Another head has another map.
    page.one("[aria-label='layer 2, head 3']").click()
    assert "layer 2, head 3" in page.one(".tl-title").text
    second = until(lambda: (now := page.settled()) != first and now)
    assert page.one("[aria-label='layer 2, head 3']").get_attribute("aria-selected") == "true"
    # The future cannot be seen.
    page.point(0.9, 0.1)
    until(lambda: "cannot see" in page.status())
    # Zoomed far in, pairs of tokens have names and a value in every pane.
    for _ in range(6):
        page.wheel(0.2, 0.6, -400)
    third = until(lambda: (now := page.settled()) != second and now)
    page.point(0.3, 0.5)
    text = until(lambda: "→" in page.status() and page.status())
    assert text.startswith("query ")
    assert "“·word" in text
    for label in ("the model's own", "view 1", "view 2", "difference"):
        assert label in text
    page.browser.find_element(By.XPATH, "//button[.='Fit']").click()
    until(lambda: (now := page.settled()) != third and now)
    assert not page.complaints()


def test_views_and_their_difference_stay_in_one_row(page: Page) -> None:
    """Also where four panes have no room beside each other."""
    places = (
        "return [...document.querySelectorAll('.tl-map')].map((one) => Math.round(one.getBoundingClientRect().top))"
    )
    page.browser.set_window_size(1400, 1000)
    own, *views = page.browser.execute_script(places)
    assert len(set(views)) == 1
    assert own < views[0]
    try:
        page.browser.set_window_size(2200, 1000)
        until(lambda: len(set(page.browser.execute_script(places))) == 1)
        page.browser.set_window_size(500, 1000)
        until(lambda: len(set(page.browser.execute_script(places))) == 4)
    finally:
        page.browser.set_window_size(1400, 1000)


def test_zooming_reads_the_right_pair(page: Page, server: ExplorerServer) -> None:
    """The value in the status line is the captured map's at the pair that it names."""
    for _ in range(6):
        page.wheel(0.1, 0.9, -400)
    page.settled()
    page.point(0.4, 0.4)
    text = until(lambda: page.status().startswith("query ") and page.status())
    names, values = text.split(": ")
    query, key = (int(part.split()[1]) for part in names.split(" → "))
    assert server.session is not None
    value = float(server.session.captures[0].map(0, 0).image[query, key])
    shown = float(values.split(" · ")[0].removeprefix("the model's own ").replace("−", "-"))
    assert shown == pytest.approx(value, rel=6e-3)


def test_keyboard_alone(page: Page) -> None:
    before = page.settled()
    thumb = page.one(".tl-chosen")
    thumb.send_keys(Keys.ARROW_DOWN)
    until(lambda: "layer 1, head 0" in page.one(".tl-title").text)
    after = until(lambda: (now := page.settled()) != before and now)
    canvas = page.one(".tl-map")
    canvas.send_keys("+", "+", Keys.ARROW_LEFT)
    zoomed = until(lambda: (now := page.settled()) != after and now)
    canvas.send_keys(Keys.SHIFT + Keys.ARROW_UP)
    until(lambda: page.status().startswith("quer"))
    canvas.send_keys("0")
    until(lambda: page.settled() != zoomed)
    assert "Arrow keys pan" in canvas.get_attribute("aria-label")


def test_scale_and_reduction_change_the_picture(page: Page) -> None:
    pictures = [page.settled()]
    for name, value in (("scale", "linear"), ("pixel shows", "the sum")):
        select = page.browser.find_element(By.XPATH, f"//label[span='{name}']/select")
        Select(select).select_by_visible_text(value)
        pictures.append(until(lambda: (now := page.settled()) != pictures[-1] and now))
    assert len(set(pictures)) == 3


def test_tokens_are_text_and_never_markup(page: Page) -> None:
    """The window of the first tokens, some of which are markup, zoomed to where they are drawn and named."""
    for _ in range(8):
        page.wheel(0.01, 0.01, -400)
    page.settled()
    page.point(0.05, 0.3)
    text = until(lambda: page.status().startswith("query ") and page.status())
    assert HOSTILE[0][:12] in text
    assert page.browser.execute_script("return window.hacked === undefined")
    assert not page.browser.find_elements(By.CSS_SELECTOR, "main img, main script")


def test_dark_mode(page: Page) -> None:
    paper = "return getComputedStyle(document.querySelector('.tl-explorer')).backgroundColor"
    light, before = page.browser.execute_script(paper), page.settled()
    media = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    try:
        until(lambda: page.browser.execute_script(paper) != light)
        assert page.settled() != before
    finally:
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_server_that_has_gone_is_said(page: Page) -> None:
    page.settled()
    page.browser.execute_script("window.fetch = () => Promise.reject(new TypeError('network'))")
    page.one("[aria-label='layer 1, head 1']").click()
    until(lambda: "does not answer" in page.status())


def test_two_models_are_aligned_by_characters(browser: Any) -> None:
    """The second model's tokens are half as long: its windows have twice the numbers."""
    first = made("coarse", tokens=60, layers=1)
    fine = [part for word in first.tokens for part in (word[: len(word) // 2], word[len(word) // 2 :])]
    q, k = (torch.randn(1, heads, len(fine), 8) for heads in (4, 2))
    running = serve_in_background(open_session(first, compare=Captured.from_tensors("fine", fine, [(q, k)])))
    try:
        page = Page(browser)
        page.open(running.url)
        page.wheel(0.5, 0.5, -400)
        page.settled()
        asked = browser.execute_script(
            "const names = performance.getEntriesByType('resource').map((one) => one.name);"
            "return names.filter((name) => name.includes('/map?'));"
        )
        windows = {}
        for address in asked:
            words = dict(parse_qsl(urlsplit(address).query))
            windows[words["pane"]] = [int(x) for x in words["rows"].split(",")]
        assert windows["p0"] != [0, 60]
        assert [abs(b - 2 * a) <= 2 for a, b in zip(windows["p0"], windows["p1"], strict=True)] == [True, True]
    finally:
        running.shutdown()
        running.server_close()


def test_a_second_model_that_read_less_and_drops_spaces(browser: Any) -> None:
    """It shows what it has; where it has nothing it says so; letters are aligned, whatever becomes of spaces."""
    first = made("spaced", tokens=80, layers=1)
    words = ["[CLS]", *(word.strip() for word in first.tokens[:50]), "[SEP]"]
    q, k = (torch.randn(1, heads, len(words), 8) for heads in (4, 2))
    running = serve_in_background(open_session(first, compare=Captured.from_tensors("bare", words, [(q, k)])))
    try:
        page = Page(browser)
        page.open(running.url)
        until(lambda: page.colors(1) > 10)
        page.point(0.2, 0.52)
        text = until(lambda: page.status().startswith("query ") and page.status())
        query = int(text.split()[1])
        page.point(0.2, 0.52, pane=1)
        until(lambda: page.status().startswith("query ") and page.status() != text)
        assert abs(int(page.status().split()[1]) - query - 1) <= 1  # one further, for [CLS]
        for _ in range(8):
            page.wheel(0.98, 0.98, -400)
        until(lambda: "read less of the text" in page.browser.find_elements(By.CSS_SELECTOR, ".tl-note")[1].text)
        assert not page.complaints()
    finally:
        running.shutdown()
        running.server_close()


def test_the_widgets_module_draws_in_a_notebooks_place(browser: Any, tmp_path: Path) -> None:
    """The same modules behind a widget's channel, whose answers are canned here."""
    session = Session([made(tokens=40)])
    answers: dict[str, Any] = {}
    words = {"pane": "p0", "layer": "0", "head": "0", "rows": "0,40", "columns": "0,40", "resolution": "40",
             "reduce": "max", "quality": "quick", "size": "40"}  # fmt: skip
    for kind in ("meta", "map", "thumbnails"):
        header, numbers = session.answer(kind, words)
        answers[kind] = {"header": header, "data": base64.b64encode(numbers.astype("<f4").tobytes()).decode()}
    module = base64.b64encode(static_files.module().encode()).decode()
    script = f"""
    const answers = {json.dumps(answers).replace("<", chr(92) + "u003c")};
    const listeners = [];
    const model = {{
      on: (name, call) => listeners.push(call),
      send: ({{ id, kind }}) => setTimeout(() => {{
        const bytes = Uint8Array.from(atob(answers[kind].data), (c) => c.charCodeAt(0));
        for (const call of listeners) call({{ id, header: answers[kind].header }}, [new DataView(bytes.buffer)]);
      }}, 5),
    }};
    const widget = await import("data:text/javascript;base64,{module}");
    window.close_widget = await widget.default.render({{ model, el: document.querySelector("#cell") }});
    """
    (tmp_path / "notebook.html").write_text(
        f"<!doctype html><meta charset=utf-8><style>{static_files.style()}</style><body data-jp-theme-light=false>"
        f"<div id=cell></div><script type=module>{script}</script>",
        encoding="utf-8",
    )
    page = Page(browser)
    page.open((tmp_path / "notebook.html").as_uri())
    # The notebook's theme is dark.
    assert "tl-dark" in page.one(".tl-explorer").get_attribute("class")
    page.point(0.3, 0.6)
    until(lambda: page.status().startswith("query "))
    assert not page.complaints()
    browser.execute_script("window.close_widget()")
