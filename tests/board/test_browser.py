"""The page as a user meets it: a real browser, a real run. Skipped where there is no Chromium with its driver."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.running import ENVIRONMENT, ROOT
from training.report.run_files import read_record

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (BROWSER and DRIVER), reason="needs chromium and chromedriver"),
]
SMALL = {"d_model": "32", "d_kv": "16", "d_ff": "64", "num_heads": "2", "vocab_size": "512", "mixed_precision": "no"}
PATIENCE = 240


class Page:
    """A page's process, and a browser that looks at it."""

    def __init__(self, folder: Path, browser: Any) -> None:
        self.folder = folder
        self.browser = browser
        self.start()

    def start(self) -> None:
        """Start the page; the address is what it prints."""
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "train_low_mem.py"), "board", "--port=0", "--data_dir=files"],
            cwd=self.folder,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        address = re.search(r"http://\S+", self.process.stdout.readline())
        assert address is not None
        self.address = address.group().rstrip("/")

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def open(self, path: str) -> None:
        self.browser.get(self.address + path)

    def find(self, selector: str) -> Any:
        """The first element that is shown, as soon as it is."""
        return self.wait(lambda: next((one for one in self.all(selector) if one.is_displayed()), None), selector)

    def all(self, selector: str) -> list[Any]:
        return list(self.browser.find_elements("css selector", selector))

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        from selenium.common.exceptions import StaleElementReferenceException, TimeoutException
        from selenium.webdriver.support.ui import WebDriverWait

        waiting = WebDriverWait(self.browser, PATIENCE, 0.2, ignored_exceptions=[StaleElementReferenceException])
        try:
            return waiting.until(lambda _: condition())
        except TimeoutException:
            text = self.browser.execute_script("return document.body.innerText")
            raise AssertionError(f"{what} never came; the page says:\n{text}") from None

    def text(self) -> str:
        return str(self.browser.execute_script("return document.body.innerText"))

    def state(self) -> str:
        return str(
            self.browser.execute_script("return document.querySelector('h1 + .pill')?.className.split(' ')[1] ?? ''")
        )

    def step(self) -> int:
        text = self.browser.execute_script("return document.querySelector('.progress-stat .value')?.textContent ?? ''")
        return int(re.sub(r"\D", "", text.partition(" of ")[0]) or 0)

    def errors(self) -> list[str]:
        """What the browser complained of, but for a server that was away."""
        return [
            entry["message"]
            for entry in self.browser.get_log("browser")
            if entry["level"] == "SEVERE" and "ERR_" not in entry["message"]
        ]


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    options.binary_location = BROWSER
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1360,900"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})  # type: ignore[no-untyped-call]
    (tmp_path / "files").mkdir()
    lines = [f"line {n} tells of the river, the bridge and {n % 17} small boats\n" for n in range(400)]
    (tmp_path / "files" / "river.txt").write_text("\n".join(lines))
    browser = Chrome(options=options, service=ChromeService(DRIVER))
    page = Page(tmp_path, browser)
    try:
        yield page
    finally:
        browser.quit()
        page.end()
        for path in tmp_path.glob("logs/*/heartbeat.json"):
            beat = read_record(path)
            if beat.get("state") == "running":
                os.kill(int(beat["process"]), signal.SIGKILL)


def fill(page: Page, name: str, value: str) -> None:
    field = page.find(f"[data-flag={name}]")
    if field.tag_name == "select":
        page.browser.execute_script(
            "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('change'))", field, value
        )
    else:
        field.send_keys(value)


def start_from_the_form(page: Page) -> None:
    page.open("/new")
    page.find("[data-file='river.txt']").click()
    page.wait(lambda: "bridge" in page.text(), "a preview of the rows")
    fill(page, "run_name", "river")
    fill(page, "max_steps", "5000")
    fill(page, "max_seq_len", "32")
    fill(page, "effective_batch_size", "4")
    page.browser.find_element("xpath", "//summary[contains(., 'All settings')]").click()
    search = page.find("input[type=search]")
    for name, value in SMALL.items():
        search.clear()
        search.send_keys(name)
        fill(page, name, value)
    page.wait(lambda: "--d_ff=64" in page.text() and "--mixed_precision=no" in page.text(), "the command")
    page.find("#start").click()


def test_a_run_from_its_form_to_a_talk_with_it(page: Page) -> None:
    start_from_the_form(page)
    page.wait(lambda: page.state() == "running" and page.step() > 2, "a running run with steps")
    page.find("#charts canvas")
    step = page.step()
    page.wait(lambda: page.step() > step, "charts that move")

    page.browser.refresh()
    page.wait(lambda: page.state() == "running" and page.step() > step, "the same run after a reload")

    page.end()
    page.start()
    page.open("/run/river")
    page.wait(lambda: page.state() == "running" and page.step() > step, "the same run in another page's process")

    page.find("#save").click()
    checkpoints = page.folder / "model_save" / "river" / "checkpoints"
    page.wait(lambda: list(checkpoints.glob("step_*/model.safetensors")), "a checkpoint that was asked for")
    page.find("#stop").click()
    page.wait(lambda: page.state() == "stopped", "a run that stopped when it was asked to")
    stopped = page.step()

    page.find("#resume").click()
    page.wait(lambda: page.state() == "running" and page.step() > stopped, "a run that goes on")
    page.find("#stop").click()
    page.wait(lambda: page.state() == "stopped", "a run that stopped again")

    page.open("/chat")
    page.find("#question").send_keys("the river and <extra_id_0> boats")
    page.find("#send").click()
    page.wait(lambda: page.all(".turn.its") and not page.all(".turn.its .dots"), "an answer")
    assert not page.all(".turn.bad"), page.text()
    assert not page.errors()


@pytest.mark.parametrize(("width", "language"), [(390, "zh"), (1360, "en")])
def test_nothing_runs_over_the_edge(page: Page, width: int, language: str) -> None:
    size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 600}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    page.open("/")
    page.browser.execute_script("localStorage.setItem('language', arguments[0])", language)
    for path in ("/", "/new", "/plan", "/chat"):
        page.open(path)
        page.find("h1")
        assert page.browser.execute_script("return document.documentElement.scrollWidth <= innerWidth"), path
        unnamed = page.browser.execute_script(
            "return [...document.querySelectorAll('button, input:not([hidden]), select, textarea')].filter((one) => "
            "!(one.textContent.trim() || one.getAttribute('aria-label') || one.labels?.length)).map((one) => "
            "one.outerHTML)"
        )
        assert not unnamed, f"{path}: no name for a screen reader: {unnamed}"
    assert not page.errors()
