"""The report in headless Chromium: it sorts, filters, runs nothing hostile, and prints on A4 without losing a cell."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from report_inputs import HOSTILE

from theory_lab.report import write_report
from theory_lab.report.parts import visible
from theory_lab.store import rows_to_parquet

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    flags = (
        "headless=new",
        "no-sandbox",
        "disable-gpu",
        "disable-quic",
        "no-first-run",
        "disable-background-networking",
    )
    profile = tmp_path_factory.mktemp("profile")
    for flag in (
        *flags,
        "disable-component-update",
        "disable-sync",
        "window-size=1400,1000",
        f"user-data-dir={profile}",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def big(rows: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of three thousand rows that differ in every number."""
    frame = pd.concat([rows] * (3000 // len(rows) + 1), ignore_index=True).head(3000)
    frame["estimate"] = frame.estimate * (1 + frame.index / 7919)
    folder = tmp_path_factory.mktemp("big")
    (folder / "rows.parquet").write_bytes(rows_to_parquet(frame))
    write_report([str(folder / "rows.parquet")], html=str(folder / "report.html"))
    return folder / "report.html"


def column(browser: Any, index: int, shown: bool = True) -> list[str]:
    """Texts of a column of the long table: of the rows on the screen, or of all that the filter admits."""
    return browser.execute_script(
        "return Array.from(document.querySelectorAll('#s0t0d tbody tr'))"
        ".filter(r => arguments[1] ? r.offsetParent !== null : !r.hidden).map(r => r.cells[arguments[0]].textContent)",
        index, shown,
    )  # fmt: skip


def head(browser: Any, title: str) -> int:
    heads = browser.execute_script(
        "return Array.from(document.querySelectorAll('#s0t0d thead th'), h => h.firstChild.textContent)"
    )
    return heads.index(title)


def test_sorts_filters_and_says_how_many(browser: Any, big: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.select import Select

    browser.get(big.as_uri())
    estimate = head(browser, "estimate")
    before = column(browser, estimate, shown=False)
    assert len(before) == 3000
    assert len(column(browser, estimate)) == 200

    button = browser.find_elements(By.CSS_SELECTOR, "#s0t0d thead button")[estimate]
    values = (
        "return Array.from(document.querySelectorAll('#s0t0d tbody tr'), r => Number(r.cells[arguments[0]].dataset.v))"
    )
    button.send_keys(Keys.ENTER)  # from the keyboard
    numbers = browser.execute_script(values, estimate)
    assert numbers == sorted(numbers)
    button.click()
    numbers = browser.execute_script(values, estimate)
    assert numbers == sorted(numbers, reverse=True)
    assert browser.find_element(By.CSS_SELECTOR, "#s0t0d th[aria-sort=descending]").text.startswith("estimate")
    button.click()
    assert column(browser, estimate, shown=False) == before

    count = browser.find_element(By.CSS_SELECTOR, "output")
    search = browser.find_element(By.CSS_SELECTOR, "input[type=search]")
    search.send_keys("LAPLACE tda-4.6")
    noise, claim, verdict = (head(browser, title) for title in ("noise or subject", "claim", "verdict"))
    kept = column(browser, noise, shown=False)
    assert set(kept) == {"laplace †"}
    assert set(column(browser, claim, shown=False)) == {"tda-4.6"}
    assert count.text == f"{len(kept)} of 3000 rows"
    Select(browser.find_elements(By.CSS_SELECTOR, "select")[1]).select_by_visible_text("VIOLATED")
    assert set(column(browser, verdict, shown=False)) == {"VIOLATED"}
    browser.find_element(By.CSS_SELECTOR, ".reset").click()
    assert count.text == "3000 rows"
    browser.find_element(By.CSS_SELECTOR, ".more").click()
    assert len(column(browser, estimate)) == 3000
    assert not [line for line in browser.get_log("browser") if line["level"] == "SEVERE"]


def test_asks_nothing_of_a_network(browser: Any, big: Path) -> None:
    browser.get_log("performance")
    browser.get(big.as_uri())
    asked = re.findall(r'"url":"([a-z-]+):', "".join(line["message"] for line in browser.get_log("performance")))
    assert asked
    assert set(asked) <= {"file", "data", "about"}


def test_hostile_texts_are_shown_and_do_nothing(browser: Any, hostile: Path, tmp_path: Path) -> None:
    page = tmp_path / "hostile.html"
    write_report([str(hostile)], html=str(page), title="</title><script>document.title='owned'</script>")
    browser.get(page.as_uri())
    assert browser.title.startswith("</title><script>")
    texts = column(browser, head(browser, "noise or subject"), shown=False)
    assert [text.removesuffix(" †") for text in texts] == [visible(text.replace("\ud800", "")) for text in HOSTILE]
    # And should a text escape: neither a handler nor a script of its own runs under the page's policy.
    browser.execute_script("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title=1\">')")
    browser.execute_async_script("setTimeout(arguments[0], 200)")
    assert browser.title.startswith("</title><script>")
    assert any("Content Security Policy" in line["message"] for line in browser.get_log("browser"))


def test_prints_every_row_on_a4(browser: Any, folder: Path, rows: pd.DataFrame, tmp_path: Path) -> None:
    write_report([str(folder)], html=str(tmp_path / "r.html"))
    browser.get((tmp_path / "r.html").as_uri())
    found = browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True, "printBackground": True})
    (tmp_path / "r.pdf").write_bytes(base64.b64decode(found["data"]))
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    # As wide as A4 landscape within its margins: nothing may stick out.
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 1032, "height": 730, "deviceScaleFactor": 1, "mobile": False}
    )
    wide = browser.execute_script(
        "const out = e => e.getBoundingClientRect().right > 1033 || e.scrollWidth > e.clientWidth + 2;"
        "return Array.from(document.querySelectorAll('table, img, pre, td, th')).filter(out).map(e => e.outerHTML)"
    )
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert wide == []
    if shutil.which("pdftotext") is None:
        pytest.skip("what is on the paper is read by pdftotext (poppler-utils)")
    about = subprocess.run(["pdfinfo", "r.pdf"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "(A4)" in about
    text = subprocess.run(
        ["pdftotext", "-layout", "r.pdf", "-"], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert text.count("VIOLATED") >= (rows.verdict == "VIOLATED").sum()
    pages = [page for page in text.split("\f") if re.search(r"tda-4\.\d +(gaussian|spherical|laplace)", page)]
    assert pages
    assert all("interval" in page for page in pages)  # the head is on every page
