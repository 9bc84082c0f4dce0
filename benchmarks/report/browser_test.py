"""The page in a real browser with no network: it runs when Chromium is found on the machine, and is skipped elsewhere.

Chromium is spoken to through a pipe, by its DevTools protocol, so that no package is needed for it. Deselect these with
``-m 'not browser'``; ``apt-get install chromium`` and its like bring what they need.
"""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys

import pytest

from benchmarks.report import write_report
from benchmarks.report.conftest import gates, steps, write_run

NAMES = ("chromium", "chromium-browser", "google-chrome")
BINARY = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = (
    "--headless=new", "--no-sandbox", "--remote-debugging-pipe", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
    "--disable-dev-shm-usage", "--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip

pytestmark = [pytest.mark.browser, pytest.mark.skipif(BINARY is None, reason="there is no Chromium here")]


class Browser:
    """A tab of a headless Chromium; ``events`` holds what it reported."""

    def __init__(self, profile):
        (to_read, to_write), (from_read, from_write) = os.pipe(), os.pipe()
        # The protocol's ends are 3 and 4 in the child; here they must be neither, or one would close the other.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_read, from_write)]
        start = "import os, sys; a = sys.argv; os.dup2(int(a[1]), 3); os.dup2(int(a[2]), 4); os.execv(a[3], a[3:])"
        self._process = subprocess.Popen(
            [sys.executable, "-c", start, *map(str, ends), BINARY, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=ends, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        for end in (to_read, from_write, *ends):
            os.close(end)
        self._to, self._from = os.fdopen(to_write, "wb"), os.fdopen(from_read, "rb")
        self._number, self._session, self._rest, self.events = 0, None, b"", []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, path, width=1200, scheme="light"):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._read()

    def run(self, script):
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key, code, text=None):
        for kind in ("keyDown", "keyUp"):
            extra = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **extra)

    def screenshot(self, path):
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self):
        self._session = None
        self.call("Browser.close")
        self._to.close()
        self._from.close()
        self._process.wait(30)

    def _read(self):
        while b"\0" not in self._rest:
            chunk = os.read(self._from.fileno(), 1 << 20)
            assert chunk, "the browser has ended"
            self._rest += chunk
        message, self._rest = self._rest.split(b"\0", 1)
        answer = json.loads(message)
        if "method" in answer:
            self.events.append(answer)
        return answer


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


# Text of which colour and background differ by less than WCAG's 4.5, wherever a background is set.
CONTRASTS = """
(() => {
  const parse = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((one) => one / 255)
    .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
    .reduce((sum, one, index) => sum + one * [0.2126, 0.7152, 0.0722][index], 0);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const color = parse(getComputedStyle(node).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const bad = new Set();
  for (const node of document.body.querySelectorAll("*")) {
    if (![...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim())) continue;
    const style = getComputedStyle(node);
    const is_drawn = node instanceof SVGElement;
    if (node.closest("script") || (is_drawn && node.tagName !== "text")) continue;
    const [one, other] = [light(parse(is_drawn ? style.fill : style.color)), light(behind(node))].sort((a, b) => b - a);
    if ((one + 0.05) / (other + 0.05) < 4.5) bad.add(`${node.tagName}.${node.getAttribute("class")}`);
  }
  return [...bad];
})()
"""
COLUMN = """
(() => {
  const table = document.querySelector("main table.sorts");
  const names = [...table.tHead.rows[0].cells].map((cell) => cell.querySelector(".name").textContent);
  const index = names.indexOf("step");
  return {
    index, sorted: table.tHead.rows[0].cells[index].getAttribute("aria-sort"),
    marked: table.tHead.querySelectorAll("[aria-sort]").length,
    values: [...table.tBodies[0].rows].map((row) => row.cells[index].dataset.value ?? null),
  };
})()
"""


@pytest.fixture(scope="module", params=["one run", "two runs"])
def page(request, full_run, tmp_path_factory):
    """A page on the disk."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    folders = [full_run]
    if request.param == "two runs":
        folders.append(write_run(tmp_path_factory.mktemp("other"), main=steps(), gates=gates()))
    write_report(folders, path)
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
def test_it_opens_without_a_request_or_an_error_and_fits_the_width(browser, page, width, scheme):
    browser.open(page, width, scheme)
    requests = [
        one["params"]["request"]["url"] for one in browser.events if one["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in requests if url != "data:,"] == [page.resolve().as_uri()]
    noise = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
    assert [one for one in browser.events if one["method"] in noise] == []
    assert browser.run("document.documentElement.scrollWidth") == width
    assert browser.run("matchMedia('(prefers-color-scheme: dark)').matches") is (scheme == "dark")
    tables = browser.run(
        "[...document.querySelectorAll('.scroll')].filter((box) => box.scrollWidth > box.clientWidth).length"
    )
    assert tables > 0 or width > 400


def test_text_stands_out_from_what_is_behind_it_in_both_schemes(browser, page):
    for scheme in ("light", "dark"):
        browser.open(page, 400, scheme)
        assert browser.run(CONTRASTS) == []


def test_tables_sort_by_click_and_by_key(browser, full_run, tmp_path):
    write_report([full_run], tmp_path / "report.html")
    browser.open(tmp_path / "report.html")
    before = browser.run(COLUMN)
    numbers = sorted(float(value) for value in before["values"] if value is not None)
    assert before["marked"] == 0 and before["values"].count(None) == 2
    button = (
        f"document.querySelector('main table.sorts').tHead.rows[0].cells[{before['index']}].querySelector('button')"
    )

    browser.run(f"{button}.click()")
    after = browser.run(COLUMN)
    assert (after["sorted"], after["marked"]) == ("ascending", 1)
    assert [float(value) for value in after["values"][:-2]] == numbers

    browser.run(f"{button}.focus()")
    browser.press("Enter", 13, "\r")
    again = browser.run(COLUMN)
    assert (again["sorted"], again["marked"]) == ("descending", 1)
    assert [float(value) for value in again["values"][:-2]] == numbers[::-1]
    assert again["values"][-2:] == [None, None]  # what has no number comes last, either way
    assert browser.run("document.activeElement.tagName") == "BUTTON"

    browser.run("document.querySelector('main table.sorts th button').click()")
    by_name = browser.run(COLUMN)
    assert (by_name["sorted"], by_name["marked"]) == (None, 1)


def test_the_keyboard_reaches_the_results_and_the_focus_is_seen(browser, page):
    browser.open(page)
    browser.press("Tab", 9)
    focused = "(({className, offsetLeft}) => [className, offsetLeft])(document.activeElement)"
    assert browser.run(focused)[0] == "skip" and browser.run(focused)[1] >= 0
    assert browser.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    browser.press("Enter", 13, "\r")
    assert browser.run("location.hash") == "#results"
    assert browser.run("document.activeElement.id") == "results"


def test_a_screen_reader_finds_names(browser, page):
    browser.open(page)
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    seen = {}
    for node in nodes:
        if not node.get("ignored"):
            seen.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    for role in ("image", "table", "region", "navigation", "link", "button", "heading"):
        assert seen[role] and all(seen[role]), role
    assert len(seen["main"]) == len(seen["banner"]) == len(seen["contentinfo"]) == 1


def test_without_scripts_the_page_is_whole(browser, page):
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(page)
        root = browser.call("DOM.getDocument")["root"]["nodeId"]
        count = {
            name: len(browser.call("DOM.querySelectorAll", nodeId=root, selector=name)["nodeIds"])
            for name in ("th", "th button", "tbody tr")
        }
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert count["th"] and count["tbody tr"] and not count["th button"]
