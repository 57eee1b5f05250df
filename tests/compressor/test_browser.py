"""The pages in a real browser: typed into, clicked, looked at by their boxes, with nothing on the console."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from compressor.page import bars, height_for, lines, scatter, svg
from compressor.report import write_report
from compressor.ui import STUDENT, TEACHER
from serving.client import FakeClient
from serving.errors import UnavailableError
from tests.benchmarks.test_compare_page import page_of
from tests.compressor.test_ui import TEACHER_SAYS, a_run, client, comparison, failing, serving
from tests.reporting import make_run

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PHONE, DESK = 390, 1200  # widths, pixels

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium here; `make browser` installs it as root"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # The sandbox needs rights that a container lacks; these pages are our own.
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@dataclass
class Tab:
    page: Page
    said: list[str] = field(default_factory=list)
    """Everything on the console, and what else went wrong."""

    @property
    def is_within_its_width(self) -> bool:
        return bool(self.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))


@contextmanager
def tab(browser: Browser, *, width: int = DESK, **settings: Any) -> Iterator[Tab]:
    page = browser.new_page(viewport={"width": width, "height": 900}, **settings)
    opened = Tab(page)
    page.on("console", lambda message: opened.said.append(message.text))
    page.on("pageerror", lambda error: opened.said.append(str(error)))
    page.set_default_timeout(20_000)
    yield opened
    page.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a report on made-up figures."""
    run = tmp_path_factory.mktemp("report")
    return write_report(run, make_run(run)).as_uri()


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_the_report_fits_its_screen_and_says_nothing_on_the_console(browser: Browser, report: str, width: int) -> None:
    with tab(browser, width=width) as opened:
        opened.page.goto(report)
        assert opened.is_within_its_width
        sizes = opened.page.locator("figure text").evaluate_all(
            "all => all.map(text => text.getBoundingClientRect().height)"
        )
        assert min(sizes) >= 9  # pixels
        assert opened.said == []


@pytest.mark.parametrize("systems", [1, 3, 20])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_a_comparison_fits_its_screen_and_says_nothing_on_the_console(
    browser: Browser, tmp_path: Path, systems: int, width: int
) -> None:
    file = tmp_path / "compare.html"
    file.write_text(page_of(systems), encoding="utf-8")
    with tab(browser, width=width) as opened:
        opened.page.goto(file.as_uri())
        assert opened.is_within_its_width
        assert opened.page.locator("figure svg").count() == 6
        assert opened.said == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_plots_and_texts_of_the_report_stand_out_from_the_paper(browser: Browser, report: str, scheme: str) -> None:
    contrast = """selector => {
        const light = text => {
            const part = text.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
                .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2] + 0.05;
        };
        const paper = light(getComputedStyle(document.body).backgroundColor);
        return [...document.querySelectorAll(selector)].map(found => {
            const style = getComputedStyle(found);
            const ink = light(found instanceof SVGElement ? style.fill : style.color);
            return Math.max(ink, paper) / Math.min(ink, paper);
        });
    }"""
    with tab(browser, color_scheme=scheme) as opened:
        opened.page.goto(report)
        for selector in ("p", "td", "th", "h1", "figure text"):
            assert min(opened.page.evaluate(contrast, selector)) >= 4.5  # what WCAG asks of text


def test_the_report_prints_dark_on_white_within_the_paper(browser: Browser, report: str) -> None:
    with tab(browser, width=718, color_scheme="dark") as opened:  # A4 less margins of 1 cm, at 96 pixels an inch
        opened.page.emulate_media(media="print")
        opened.page.goto(report)
        style = opened.page.evaluate(
            "(({backgroundColor, color}) => [backgroundColor, color])(getComputedStyle(document.body))"
        )
        assert style == ["rgb(255, 255, 255)", "rgb(0, 0, 0)"]
        assert opened.is_within_its_width


@pytest.mark.parametrize("systems", [1, 3, 20])
def test_no_name_in_a_plot_lies_on_another(browser: Browser, tmp_path: Path, systems: int) -> None:
    names = [f"system {number}" for number in range(systems)]
    height = height_for(systems)
    points = {name: (1.0 + number % 4, 90 + 0.01 * number) for number, name in enumerate(names)}
    curves = {name: ([1, 4, 16], [100.0, 300.0 + number, 400.0]) for number, name in enumerate(names)}
    values = {name: 1.0 + number for number, name in enumerate(names)}
    plots = [
        svg("a", lambda axes: scatter(axes, points, ("ms", "accuracy"), log_x=True), height=height),
        svg("b", lambda axes: lines(axes, curves, ("concurrency", "texts/s"), log_x=True, log_y=True), height=height),
        svg("c", lambda axes: bars(axes, values, "MB", "{:.1f} MB"), height=height),
    ]
    path = tmp_path / "plots.html"
    path.write_text("<!DOCTYPE html><title>plots</title>" + "".join(f"<figure>{plot}</figure>" for plot in plots))
    with tab(browser, width=DESK) as opened:
        opened.page.goto(path.as_uri())
        for figure in opened.page.locator("figure").all():
            boxes = figure.locator("text", has_text="system").evaluate_all(
                "all => all.map(text => text.getBoundingClientRect()).map(box => [box.y, box.bottom, box.x, box.right])"
            )
            drawn = figure.locator("svg").bounding_box()
            assert drawn is not None
            assert len(boxes) == systems
            boxes.sort()
            # Line boxes are a third higher than the letters in them.
            assert all(later[0] >= earlier[1] - (earlier[1] - earlier[0]) / 4 for earlier, later in pairwise(boxes))
            assert min(left for _, _, left, _ in boxes) >= drawn["x"] - 1
            assert max(right for *_, right in boxes) <= drawn["x"] + drawn["width"] + 12


def test_a_typed_text_is_answered_side_by_side(browser: Browser) -> None:
    with serving(comparison()) as server, tab(browser, width=PHONE) as opened:
        page = opened.page
        page.goto(server.url)
        page.get_by_label("Text").press_sequentially("a long film")
        page.get_by_role("button", name="Classify").click()
        expect(page.locator("#verdict")).to_contain_text(
            "They disagree: the teacher says positive, the student negative. The student answered"
        )
        rows = {
            row.locator("td").first.inner_text(): row.locator("td").all_inner_texts()[1:]
            for row in page.locator("#facts tr").all()
        }
        assert rows["label"] == ["positive", "negative"]
        assert [text.strip() for text in rows["probability of positive"]] == ["60.0\u00a0%", "30.0\u00a0%"]
        assert rows["size, MB"] == ["90.0", "15.0"]
        assert all(0 < float(text) < 1000 for text in rows["latency, ms"])
        assert opened.is_within_its_width
        assert opened.said == []


def test_disagreements_appear_when_asked_for(browser: Browser) -> None:
    with serving(comparison()) as server, tab(browser) as opened:
        page = opened.page
        page.goto(server.url)
        expect(page.locator("#apart")).to_be_hidden()
        page.get_by_role("button", name="Look").click()
        expect(page.locator("#apart-says")).to_have_text(
            "They disagree on 2 of 4 validation texts. Only the teacher is right on 2, only the student on 0 "
            "(McNemar p = 0.50)."
        )
        assert page.locator("#examples tr").first.locator("td").all_inner_texts() == [
            "an odd film",
            "positive",
            "positive, 70.0 %",
            "negative, 95.0 %",
        ]
        assert opened.said == []


def test_where_they_never_disagree_there_is_no_table(browser: Browser) -> None:
    clients = dict.fromkeys((TEACHER, STUDENT), client(TEACHER_SAYS))
    with serving(comparison(clients=clients)) as server, tab(browser) as opened:
        opened.page.goto(server.url)
        opened.page.get_by_role("button", name="Look").click()
        expect(opened.page.locator("#apart-says")).to_have_text("They disagree on 0 of 4 validation texts.")
        expect(opened.page.locator("#examples")).to_be_hidden()


def test_a_text_that_looks_like_markup_stays_text(browser: Browser) -> None:
    hostile = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    clients = {TEACHER: client({hostile: 0.9}), STUDENT: client({hostile: 0.2})}
    run = a_run()
    run = type(run)(task=run.task, size_bytes=run.size_bytes, texts=[(hostile,)], label_N=run.label_N[:1])
    with serving(comparison(clients=clients, run=run)) as server, tab(browser) as opened:
        opened.page.on("dialog", lambda dialog: opened.said.append(dialog.message))
        opened.page.goto(server.url)
        opened.page.get_by_label("Text").fill(hostile)
        opened.page.get_by_role("button", name="Classify").click()
        expect(opened.page.locator("#answer")).to_be_visible()
        opened.page.get_by_role("button", name="Look").click()
        expect(opened.page.locator("#examples td").first).to_have_text(hostile)
        assert opened.page.locator("img").count() == 0
        assert opened.said == []


def test_a_pair_of_texts_has_two_fields(browser: Browser) -> None:
    pairs = {("a man", "a song"): 3.5}
    clients = {name: FakeClient(pairs, labels=(), pair=True) for name in (TEACHER, STUDENT)}
    with serving(comparison(name="stsb", clients=clients, run=None)) as server, tab(browser) as opened:
        opened.page.goto(server.url)
        opened.page.get_by_label("First text").fill("a man")
        opened.page.get_by_label("Second text").fill("a song")
        opened.page.get_by_role("button", name="Classify").click()
        expect(opened.page.locator("#verdict")).to_contain_text("The teacher says 3.50, the student 3.50.")
        assert opened.page.get_by_role("button", name="Look").count() == 0
        assert opened.said == []


def test_an_error_appears_as_its_sentence_and_goes_with_the_next_answer(browser: Browser) -> None:
    sentence = "no server answers at 127.0.0.1:8001; start one with `compressor serve`"
    down = {TEACHER: failing(UnavailableError(sentence)), STUDENT: client({})}
    with serving(comparison(clients=down)) as server, tab(browser) as opened:
        page = opened.page
        page.goto(server.url)
        page.get_by_label("Text").fill("a good film")
        page.get_by_role("button", name="Classify").click()
        expect(page.get_by_role("alert").first).to_have_text(sentence)
        expect(page.locator("#answer")).to_be_hidden()
        assert [text for text in opened.said if "503" not in text] == []  # the browser's own note of the status
        server.comparison = comparison()  # the server is back
        page.get_by_role("button", name="Classify").click()
        expect(page.locator("#verdict")).to_contain_text("Both say positive.")
        expect(page.get_by_role("alert").first).to_be_hidden()


def test_a_page_whose_server_cannot_be_reached_says_so(browser: Browser) -> None:
    with serving(comparison()) as server, tab(browser) as opened:
        opened.page.goto(server.url)
        opened.page.context.set_offline(True)
        opened.page.get_by_label("Text").fill("a good film")
        opened.page.get_by_role("button", name="Classify").click()
        expect(opened.page.get_by_role("alert").first).to_have_text(
            "The server of this page gave no answer; see whether `compressor ui` still runs."
        )
