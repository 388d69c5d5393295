"""The report's page in a real browser: what is drawn, how it fits, and whether it can be read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtrain import cli
from dtrain.monitor.live_run import LiveRun
from dtrain.monitor.live_server import LiveServer
from dtrain.monitor.report import render
from dtrain.monitor.run_reader import read_run
from run_directories import write_metrics, write_run

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
WebDriverWait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait
pytestmark = pytest.mark.early("the browser's first start on a machine reads the disk for up to a minute")

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WIDTHS = (1280, 400)

# The boxes of all that is written in a chart or a legend, chart by chart, and pairs that lie over each other.
OVERLAPS = """
const found = [];
for (const chart of document.querySelectorAll('.chart')) {
  const texts = [...chart.querySelectorAll('svg[role=img] text, .legend li, h3')];
  const boxes = texts.map(t => [t.textContent, t.getBoundingClientRect()]);
  const svg = chart.querySelector('svg[role=img]').getBoundingClientRect();
  for (const [i, [a, p]] of boxes.entries()) {
    const outside = p.left < svg.left - 1 || p.right > svg.right + 1;
    if (texts[i].closest('svg') && outside) found.push([a, 'is cut off']);
    for (const [b, q] of boxes.slice(i + 1))
      if (p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 3 && q.top < p.bottom - 3)
        found.push([a, b]);
  }
}
return found;
"""
# Each visible text's contrast to the nearest ground behind it, as WCAG counts it; those below 4.5.
FAINT = """
const rgba = c => { const n = c.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
  .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const ground = e => {
  for (; e; e = e.parentElement) {
    const found = rgba(getComputedStyle(e).backgroundColor);
    if (found[3] === 1) return found;
  }
  return [255, 255, 255, 1];
};
const found = [];
let seen = 0;
for (const e of document.querySelectorAll('body *')) {
  if (e.closest('script, style') || !e.getClientRects().length) continue;
  if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())) continue;
  const style = getComputedStyle(e);
  const [a, b] = [light(rgba(e.closest('svg') ? style.fill : style.color)), light(ground(e))];
  const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  seen += 1;
  if (contrast < 4.5) found.push([e.textContent.slice(0, 30), contrast]);
}
return [seen, found];
"""
# The tables with long texts that are wider than their place, and the settings if they are a box to scroll in.
CUT = """
const boxes = [...document.querySelectorAll('.scroll')].filter(box => box.getClientRects().length);
const settings = document.querySelector('#configuration .scroll');
return boxes.filter(box => box.querySelector('.stacked') && box.scrollWidth > box.clientWidth + 1
  || box === settings && box.scrollHeight > box.clientHeight + 1).map(box => box.getAttribute('aria-label'));
"""
DRAWN = """
return [...document.querySelectorAll('.chart')].map(chart => {
  const size = part => { const b = part.getBoundingClientRect(); return b.width + b.height; };
  const all = kind => [...chart.querySelectorAll('svg[role=img] ' + kind)];
  return {
    title: chart.querySelector('h3').textContent,
    curves: all('.series .line').length,
    dots: all('.series .dot').length,
    bars: all('.stack rect').length,
    flat: all('.series path, .stack rect').filter(part => size(part) < 0.2).length,
    smallest: Math.min(...all('text').map(t => t.getBoundingClientRect().height)),
    sizes: [...new Set(all('.tick').map(t => Math.round(t.getBoundingClientRect().height)))],
    width: chart.querySelector('svg[role=img]').getBoundingClientRect().width,
  };
});
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A browser without a window, whose files all lie in a directory of the test's."""
    program = next(filter(None, map(shutil.which, _BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("chromium and chromedriver are not installed: apt-get install chromium chromium-driver")
    home = tmp_path_factory.mktemp("browser")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (*_FLAGS, f"--user-data-dir={home / 'profile'}"):
        options.add_argument(flag)
    # The path of the driver is given, so that selenium looks for none and downloads none.
    places = dict.fromkeys(("HOME", "TMPDIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"), str(home))
    service = webdriver.ChromeService(driver, env={**os.environ, **places})
    started = webdriver.Chrome(options=options, service=service)
    started.set_page_load_timeout(110)
    yield started
    started.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The report on one run, and that on four."""
    place = tmp_path_factory.mktemp("runs")
    one = write_run(
        place / "20251009-085320-digits", workers=3, slow=1, alarms=3, restarted_in=2, rate=98765.4
    )
    four = [
        write_run(
            place / name,
            epochs=4 * number,
            workers=number,
            seed=number,
            rate=900.0 * number,
            alarms=number % 2,
        )
        for number, name in enumerate(
            ("a", "second", "a run with spaces", "a-rather-" + "long-" * 12 + "name"), 1
        )
    ]
    found = {"one": place / "one.html", "four": place / "four.html"}
    assert cli.main(["report", str(one), "--output", str(found["one"])]) == 0
    assert cli.main(["report", *map(str, four), str(place / "none"), "--output", str(found["four"])]) == 0
    return found


def show(browser: Any, page: Path, width: int, scheme: str = "light") -> None:
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
    )
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    if browser.current_url != page.as_uri():
        browser.get(page.as_uri())
    browser.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true; });")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("which", ["one", "four"])
def test_the_page_fits_and_nothing_lies_over_another(
    which: str, width: int, browser: Any, pages: dict[str, Path]
) -> None:
    show(browser, pages[which], width)
    root = "document.documentElement"
    assert browser.execute_script(f"return innerWidth === {width} && {root}.scrollWidth <= innerWidth")
    assert browser.execute_script(OVERLAPS) == []
    assert browser.get_log("browser") == []
    assert browser.execute_script(CUT) == []
    drawn = browser.execute_script(DRAWN)
    assert len({size for chart in drawn for size in chart["sizes"]}) == 1, drawn
    for chart in drawn:
        assert chart["flat"] == 0, chart
        assert chart["smallest"] >= 11, f"text of {chart['title']} is too small to read"
        assert 300 <= chart["width"] <= 540, chart


def test_each_chart_of_one_run_has_its_points(browser: Any, pages: dict[str, Path]) -> None:
    show(browser, pages["one"], 1280)
    drawn = {chart["title"]: (chart["curves"], chart["dots"]) for chart in browser.execute_script(DRAWN)}
    assert drawn == {
        "loss": (2, 12),  # six epochs, each with a mark in both curves
        "accuracy": (2, 12),
        "loss, step by step": (1, 1),  # more points than have marks: one at the end
        "examples/s": (1, 1),
        "time per step": (1, 1),
        "waiting for data": (1, 1),
        "learning rate": (1, 1),
        "time of each epoch": (0, 0),
    }
    bars = browser.execute_script(DRAWN)[-1]["bars"]
    assert 6 * 4 < bars <= 6 * 8, "six epochs of at most eight parts"


def test_each_chart_of_four_runs_has_four_curves(browser: Any, pages: dict[str, Path]) -> None:
    show(browser, pages["four"], 1280)
    drawn = [chart for chart in browser.execute_script(DRAWN) if not chart["bars"]]
    assert [chart["title"] for chart in drawn][:4] == [
        "loss, training",
        "loss, validation",
        "accuracy, training",
        "accuracy, validation",
    ]
    assert {chart["curves"] for chart in drawn} == {4}
    strokes = browser.execute_script(
        "return [...document.querySelector('.chart').querySelectorAll('.series')].map(s =>"
        " getComputedStyle(s).color + s.querySelector('.line').getAttribute('stroke-dasharray')"
        " + s.querySelector('.dot').getAttribute('d').replace(/^M[^m]*/, ''))"
    )
    assert len(set(strokes)) == 4


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("which", ["one", "four"])
def test_all_text_can_be_read(which: str, scheme: str, browser: Any, pages: dict[str, Path]) -> None:
    show(browser, pages[which], 1280, scheme)
    seen, faint = browser.execute_script(FAINT)
    assert seen > 200
    assert faint == []
    ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(15, 17, 21)") == (scheme == "dark")


def test_pointing_tells_values_and_buttons_hide_runs(browser: Any, pages: dict[str, Path]) -> None:
    show(browser, pages["four"], 1280)
    chart = browser.find_element("css selector", ".chart svg[role=img]")
    tip = browser.find_element("id", "tip")
    webdriver.ActionChains(browser).move_to_element_with_offset(chart, -60, 0).perform()
    assert tip.is_displayed() and tip.text.splitlines()[0].startswith("epoch ")
    assert "second" in tip.text
    button = browser.find_elements("css selector", "[data-toggle]")[1]
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    hidden = browser.execute_script(
        "return [...document.querySelectorAll('.series')].filter(s => !s.getClientRects().length)"
        ".map(s => s.dataset.run)"
    )
    assert hidden and set(hidden) == {"1"}
    chart.send_keys("\ue011")  # Home
    assert tip.is_displayed() and tip.text.startswith("epoch 1\n")
    assert "second" not in tip.text
    chart.send_keys("\ue00c")  # Escape
    assert not tip.is_displayed()
    button.click()
    assert browser.get_log("browser") == []


def test_the_loss_has_a_logarithmic_axis_and_smoothing(browser: Any, pages: dict[str, Path]) -> None:
    show(browser, pages["one"], 1280)
    figure = browser.find_element("css selector", "figure.adjustable")

    def drawn() -> tuple[list[str], list[str]]:
        return browser.execute_script(  # type: ignore[no-any-return]
            "const all = name => [...arguments[0].querySelectorAll(name)];"
            "const ticks = all('.tick[text-anchor=end]').filter(t => t.getClientRects().length);"
            "return [ticks.map(t => t.textContent), all('.plot .line').map(l => l.getAttribute('d'))]",
            figure,
        )

    before = drawn()
    button = figure.find_element("css selector", ".adjust button")
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    logarithmic = drawn()
    assert all(one != other for one, other in zip(before, logarithmic, strict=True))
    assert len(logarithmic[0]) >= 2 and not any("NaN" in path for path in logarithmic[1])
    button.click()
    assert drawn() == before
    browser.execute_script(
        "const i = arguments[0]; i.value = 0.8; i.dispatchEvent(new Event('input'))",
        figure.find_element("css selector", ".adjust input"),
    )
    smooth = drawn()
    assert smooth[0] == before[0] and len(smooth[1]) == 2 * len(before[1])  # what was measured stays behind
    assert figure.find_elements("css selector", ".line.raw")
    assert browser.get_log("browser") == []


def test_a_live_page_follows_the_run_and_keeps_what_was_chosen(browser: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "it", workers=2, restarted_in=4, status="running", end=None)
    lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.csv").unlink()
    (run / "events.jsonl").write_text("".join(lines[:25]))

    def shown(script: str) -> Any:
        return browser.execute_script(f"return {script}")

    server = LiveServer(LiveRun(lambda: run))
    with server.serving():
        browser.get(server.address)
        wait = WebDriverWait(browser, 60, poll_frequency=0.05)
        browser.execute_script(
            "document.querySelector('#time details').open = true;"
            "const input = document.querySelector('.adjust input');"
            "input.value = 0.8; input.dispatchEvent(new Event('input'))"
        )
        assert not shown("document.querySelector('#attempts')")
        with (run / "events.jsonl").open("a") as file:
            file.write("".join(lines[25:]))
        wait.until(lambda _: shown("document.querySelector('#attempts')"))
        assert "step360of 360" in shown("document.querySelector('#now').textContent")
        assert shown("document.querySelector('#time details').open")
        assert shown("document.querySelectorAll('figure.adjustable .line.raw').length") == 2
        assert shown("document.querySelector('.adjust input').value") == "0.8"
        sections = shown("[...document.querySelectorAll('main > section')].map(s => s.id)")
        assert sections[:3] == ["now", "figures", "curves"] and sections[-3:] == [
            "attempts",
            "configuration",
            "notes",
        ]
        assert browser.get_log("browser") == []
    wait.until(lambda _: "No connection" in shown("document.querySelector('#live').textContent"))
    browser.get("about:blank")
    browser.get_log("browser")


def test_keys_do_not_break_and_a_lone_chart_takes_its_card(browser: Any, tmp_path: Path) -> None:
    run = tmp_path / "it"
    write_metrics(
        write_run(run, epochs=2), [{"loss": 0.5, "examples_per_second": 100.0 + i} for i in range(4)]
    )
    (run / "events.jsonl").unlink()
    page = tmp_path / "page.html"
    page.write_text(render([read_run(run)]))
    show(browser, page, 400)
    lines = "return [...document.querySelectorAll('tbody th code')].map(c => c.getClientRects().length)"
    assert set(browser.execute_script(lines)) == {1}
    show(browser, page, 1280)
    widths = (
        "const card = document.querySelector('#speed'), seen = [...card.querySelectorAll('svg[role=img]')]"
        ".filter(s => s.getClientRects().length);"
        "return [card.clientWidth, ...seen.map(s => s.getBoundingClientRect().width)]"
    )
    card, *charts = browser.execute_script(widths)
    assert len(charts) == 1 and charts[0] > 0.95 * (card - 40)
