"""A report in a browser: no errors, no requests, a slider that moves the picture, no scrolling sideways on a phone,
colors for the dark and for paper. Skipped without Chromium (Debian: apt-get install chromium; the extra `browser`)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lapwing as lw
from helpers import integers, normal

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra `browser`")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]
QUIET = "disable-gpu disable-quic no-first-run disable-background-networking disable-component-update disable-sync"
ARGS = ["--headless", "--no-sandbox", *(f"--{name}" for name in QUIET.split())]
KINDS = ("numbers", "line", "classes", "images", "calibrated", "compared")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of each kind."""
    path, x, test = tmp_path_factory.mktemp("pages"), normal(30, 3), normal(25, 3, seed=1)
    torch.manual_seed(0)
    net = lambda i, o: nn.Sequential(nn.Linear(i, 4), nn.Tanh(), nn.Linear(4, o)).double()  # noqa: E731
    noise, y, labels = lw.likelihoods.Gaussian(0.5), test.sum(1, keepdim=True), integers(4, 25)
    numbers = lw.laplace(net(3, 1), (x, x.sum(1, keepdim=True)), noise, structure="kron", prior=2.0)
    numbers.report((test, y), path / "numbers.html", ood=9 * test)
    line = lw.laplace(net(1, 1), (x[:, :1], x[:, :1].sin()), noise, prior=2.0).recentered()
    line.report((test[:, :1], test[:, :1].sin()), path / "line.html")
    classes = lw.laplace(net(3, 4), (x, integers(4, 30, seed=1)), "categorical", structure="kron")
    classes.report((test, labels), path / "classes.html", ood=9 * test)
    images = lw.laplace(net(64, 4), (normal(30, 64), integers(4, 30)), "categorical", structure="diag", prior=5.0)
    images.report((normal(25, 64, seed=1), labels), path / "images.html")
    calibrated = lw.laplace(net(3, 4), (x, integers(4, 30, seed=1)), "classification").tuned()
    assert calibrated.calibration is not None
    calibrated.report((test, labels), path / "calibrated.html")
    lw.report(
        {"one": numbers, "a rather long name of a fit": numbers.replace(prior=9.0)}, (test, y), path / "compared.html"
    )
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield found
        found.close()


class Seen:
    """A page that is open, with what went wrong and what it asked for."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())

    def __enter__(self) -> Seen:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_goes_wrong_and_nothing_is_fetched(kind, folder, browser):
    with Seen(browser, folder / f"{kind}.html", offline=True) as seen:
        assert seen.said == []
        assert [url for url in seen.asked if not url.startswith("data:")] == [(folder / f"{kind}.html").as_uri()]
        broken = seen.page.evaluate("[...document.images].filter(i => !i.complete || !i.naturalWidth).length")
        assert broken == 0
        assert seen.page.evaluate("document.images.length") == (12 if kind == "images" else 0)


@pytest.mark.parametrize("kind", ["numbers", "line", "classes", "images", "calibrated"])
def test_the_slider_moves_the_picture_and_back(kind, folder, browser):
    name = "bars" if kind in ("numbers", "line") else "discs"
    with Seen(browser, folder / f"{kind}.html") as seen:
        read = lambda key: seen.page.locator(f"path[data-sweep={key}]").get_attribute("d")  # noqa: E731
        told = lambda: seen.page.locator("output[data-sweep=precision]").inner_text()  # noqa: E731
        start = read(name), read("marker"), told()
        picture = seen.page.locator(f"figure:has(path[data-sweep={name}])").screenshot()
        slider = seen.page.get_by_role("slider")
        slider.focus()
        slider.press("Home")
        first = read(name), read("marker"), told()
        assert all(a != b for a, b in zip(start, first, strict=True))
        assert seen.page.locator(f"figure:has(path[data-sweep={name}])").screenshot() != picture
        slider.press("ArrowRight")
        assert read("marker") != first[1]
        assert slider.get_attribute("aria-valuetext") == told()
        seen.page.get_by_role("button").click()
        assert (read(name), read("marker"), told()) == start
        assert seen.said == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_phone_need_not_scroll_sideways(kind, folder, browser):
    with Seen(browser, folder / f"{kind}.html", viewport={"width": 390, "height": 844}, is_mobile=True) as seen:
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= 390
        assert seen.page.evaluate("window.innerWidth") == 390  # not zoomed out to hold what is wider
        narrow = "[...document.querySelectorAll('figure svg')].map(s => s.getBoundingClientRect().right)"
        assert max(seen.page.evaluate(narrow)) <= 390


def contrast(page: Any, selector: str) -> float:
    """Of a text on the page's paper, by WCAG 2."""
    rgb = "e => getComputedStyle(e).{}.match(/[0-9.]+/g).slice(0, 3).map(Number)"
    ink = page.locator(selector).first.evaluate(rgb.format("color"))
    paper = page.locator("body").evaluate(rgb.format("backgroundColor"))
    light, dark = sorted((luminance(ink), luminance(paper)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(rgb: list[float]) -> float:
    linear = [v / 3294.6 if v <= 10.31 else ((v / 255 + 0.055) / 1.055) ** 2.4 for v in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_can_be_read_in_light_and_in_dark(scheme, folder, browser):
    with Seen(browser, folder / "numbers.html", color_scheme=scheme) as seen:
        paper = seen.page.locator("body").evaluate("e => getComputedStyle(e).backgroundColor")
        assert (luminance([float(v) for v in paper[4:-1].split(",")]) > 0.5) == (scheme == "light")
        for selector in ("h1", "h2", ".lead", "figcaption", "td", ".over"):
            assert contrast(seen.page, selector) >= 4.5, selector


def test_it_prints_in_ink_on_white(folder, browser, tmp_path):
    with Seen(browser, folder / "numbers.html", color_scheme="dark") as seen:
        seen.page.pdf(path=tmp_path / "it.pdf", format="A4")
        assert (tmp_path / "it.pdf").read_bytes()[:5] == b"%PDF-"
        seen.page.emulate_media(media="print")
        assert seen.page.locator("body").evaluate("e => getComputedStyle(e).backgroundColor") == "rgb(255, 255, 255)"
        assert not seen.page.get_by_role("slider").is_visible()
        assert seen.page.locator("path[data-sweep=bars]").is_visible()


def test_it_prints_the_prior_of_the_fit_wherever_the_slider_is(folder, browser, tmp_path):
    with Seen(browser, folder / "classes.html") as seen:
        told = lambda: seen.page.locator("output[data-sweep=precision]").inner_text()  # noqa: E731
        start, slider = told(), seen.page.get_by_role("slider")
        seen.page.evaluate("onbeforeprint = () => { window.printed = document.querySelector('output').innerText; }")
        slider.focus()
        slider.press("End")
        moved = told()
        seen.page.pdf(path=tmp_path / "it.pdf")
        assert seen.page.evaluate("window.printed") == start != moved
        assert told() == moved


def test_without_scripts_the_charts_are_there_and_the_slider_is_not(folder, browser):
    with Seen(browser, folder / "classes.html", java_script_enabled=False) as seen:
        assert not seen.page.get_by_role("slider").is_visible()
        assert seen.page.locator("path[data-sweep=discs]").get_attribute("d")
