"""The report in a real browser: no console errors, all images shown, tabs and legends work, narrow and dark too."""

import json
import re
import shutil
import subprocess

import pytest
import torch

from megaclass.evaluation.protocol import Evaluator, SetResult
from megaclass.evaluation.report.from_runs import report_of_runs, write_faces
from megaclass.evaluation.report.page import write_report
from megaclass.evaluation.results import write_results
from megaclass.evaluation.sets import evaluate_sets, find_sets

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(_CHROMIUM is None, reason="no chromium on this machine (apt install chromium)"),
]

# Pressed and read in the page itself; what it found comes back as text of the dumped page.
_PROBE = """
<script>
const found = {errors: window.seenErrors};
const visible = (element) => element.getClientRects().length > 0;
found.images = [...document.images].map((image) => image.complete && image.naturalWidth > 0);
const tabs = document.querySelector("[id^=sets-tab-]").parentElement;
const panels = () => [...document.querySelectorAll("[id^=sets-panel-]")].map(visible);
found.tablist_shown = visible(tabs);
found.panels_before = panels();
tabs.querySelectorAll("[role=tab]")[1].click();
found.panels_after_click = panels();
tabs.querySelectorAll("[role=tab]")[1].dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
found.panels_after_key = panels();
tabs.querySelectorAll("[role=tab]")[0].click();
const figure = document.querySelector("figure:has(svg[aria-label=ROC])");
const key = figure.querySelector("button.toggle");
const line = figure.querySelector("svg ." + key.dataset.series);
found.line = [visible(line)];
key.click();
found.line.push(visible(line));
key.click();
found.line.push(visible(line));
found.contents = [...document.querySelectorAll("nav a")].map((link) => !!document.querySelector(link.getAttribute("href")));
const chart = document.querySelector("svg[aria-label=ROC]");
const box = chart.getBoundingClientRect();
chart.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width * 0.95, clientY: box.top + 20}));
found.values = chart.nextElementSibling.textContent;
chart.dispatchEvent(new PointerEvent("pointerleave"));
found.values_after = chart.nextElementSibling.textContent;
const smoothing = document.querySelector(".smoothing input");
const loss = document.querySelector("svg[aria-label=Loss]");
const means = () => [...loss.querySelectorAll("path.line:not(.faint)")].map((path) => path.getAttribute("d"));
const singles = [...loss.querySelectorAll("path.faint")].map((path) => path.getAttribute("d"));
const slide = (value) => { smoothing.value = value; smoothing.dispatchEvent(new Event("input")); return means(); };
found.smoothing_shown = visible(smoothing);
found.unsmoothed = JSON.stringify(slide(0)) === JSON.stringify(singles);
const heights = (path) => path.split(/[ML]/).filter(Boolean).map((point) => Number(point.split(" ")[1]));
const spread = (path) => Math.max(...heights(path)) - Math.min(...heights(path));
found.spreads = [slide(0).map(spread), slide(20).map(spread)];
const table = document.querySelector("table.sortable");
const head = [...table.querySelectorAll("th button")].find((button) => button.textContent === "agedb_30");
const column = [...table.querySelectorAll("th button")].indexOf(head);
const numbers = () => [...table.tBodies[0].rows].map((row) => Number(row.querySelectorAll("td")[column].dataset.number));
head.click();
found.sorted = [numbers()];
head.click();
found.sorted.push(numbers());
found.width = [document.documentElement.scrollWidth, window.innerWidth];
found.background = getComputedStyle(document.body).backgroundColor;
const said = document.createElement("pre");
said.id = "found";
said.textContent = JSON.stringify(found);
document.body.append(said);
</script>
"""
_LISTEN = "<script>window.seenErrors = []; addEventListener('error', (e) => window.seenErrors.push(e.message), true);</script>"


@pytest.fixture
def page(tmp_path, make_run, pairs_bin, picture):
    """The report of two runs, one of which could not evaluate a set."""
    runs = [make_run("first"), make_run("second")]
    for place, run in enumerate(runs):
        torch.manual_seed(place)
        network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 16))
        evaluator = Evaluator(network=network, image_size=32, device=torch.device("cpu"))
        results = evaluate_sets(evaluator, find_sets([pairs_bin("lfw"), pairs_bin("agedb_30", 60)]))
        results.append(SetResult(name="broken", kind="pairs", path="broken.bin", error="Cannot decode image 3."))
        write_results(run, {"place": place}, results)
        write_faces(run, [[picture(row, take) for take in range(4)] for row in range(3)])
    path = tmp_path / "report.html"
    write_report(path, report_of_runs(runs, device=torch.device("cpu")))
    return path


def _browse(path, *options: str) -> tuple[str, str]:
    """The page as the browser has it in the end, and what it logged."""
    command = [
        _CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-dev-shm-usage",
        f"--user-data-dir={path.parent / 'profile'}",
        "--enable-logging=stderr",
        "--virtual-time-budget=2000",
        *options,
    ]
    done = subprocess.run([*command, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def _probed(path, *options: str) -> dict:
    """Presses tabs and keys in a copy of the page whose policy admits the test's own scripts."""
    html = path.read_text(encoding="utf-8")
    html = re.sub(r"script-src '[^']*'", "script-src 'unsafe-inline'", html).replace("<title>", _LISTEN + "<title>", 1)
    copy = path.with_name("probed.html")
    copy.write_text(html.replace("</body>", _PROBE + "</body>"), encoding="utf-8")
    dom, console = _browse(copy, *options)
    assert console == ""
    return json.loads(re.search(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)[1].replace("&gt;", ">"))


def test_the_page_as_written_loads_without_a_word_on_the_console_and_its_script_runs(page):
    dom, console = _browse(page)
    assert console == ""
    assert dom.count('aria-selected="true"') == 3, "tabs of sets, runs and configurations were set up"


def test_images_are_shown_and_tabs_and_legend_work(page):
    found = _probed(page, "--window-size=1200,900")
    assert found["errors"] == []
    assert len(found["images"]) == 12 + 2 * 2 * 2 * 24
    assert all(found["images"])
    assert found["tablist_shown"]
    assert found["panels_before"] == [True, False, False]
    assert found["panels_after_click"] == [False, True, False]
    assert found["panels_after_key"] == [False, False, True]
    assert found["line"] == [True, False, True]
    assert len(found["contents"]) >= 6 and all(found["contents"]), "every entry of the contents leads to a section"
    assert re.fullmatch(
        r"false accept rate [\d.]+: true accept rate (second|first) [\d.]+, (second|first) [\d.]+", found["values"]
    )
    assert found["values_after"] == ""
    assert found["smoothing_shown"] and found["unsmoothed"], "at its left end the slider shows the values themselves"
    falling, rising = found["sorted"]
    assert falling == sorted(falling, reverse=True) and rising == sorted(rising) and len(set(falling)) == 2
    assert len(found["spreads"][0]) == 2, "a mean per run"
    assert all(wide < raw for raw, wide in zip(*found["spreads"], strict=True)), "means over more values are flatter"


def test_a_phone_needs_no_sideways_scrolling_and_dark_is_dark(page):
    phone = _probed(page, "--window-size=390,844", "--blink-settings=preferredColorScheme=0")
    assert phone["width"][0] <= phone["width"][1]
    light = _probed(page, "--window-size=1200,900", "--blink-settings=preferredColorScheme=1")
    assert {phone["background"], light["background"]} == {"rgb(20, 23, 27)", "rgb(255, 255, 255)"}
