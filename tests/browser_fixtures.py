"""A browser that is installed, which is Playwright's own Chromium or the system's, and the pages that it opens."""

import contextlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

DESK, PHONE = (1280, 800), (390, 844)
PAPER = (688, 1017)  # A4 between its margins, in CSS pixels
A4 = (595, 842)  # points
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """Opens a browser; skips the test if none is installed."""
    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        executable = own if Path(own).exists() else next(filter(None, map(shutil.which, BROWSERS)), None)
        if executable is None:
            pytest.skip(
                f"no page was opened: there is no {', '.join(BROWSERS)} here; `playwright install chromium` brings one"
            )
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Opened:
    """A page that has been opened, and what went on while it was."""

    page: Page
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


def opened(
    browser: Browser,
    file: Path,
    size: tuple[int, int] = DESK,
    scheme: str = "light",
    touch: bool = False,
    scripts: bool = True,
) -> Opened:
    """Opens a file without a network."""
    width, height = size
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,
        has_touch=touch,
        is_mobile=touch,
        offline=True,
        java_script_enabled=scripts,
    )
    told = Opened(context.new_page())
    told.page.on("console", lambda message: told.errors.append(message.text) if message.type == "error" else None)
    told.page.on("pageerror", lambda error: told.errors.append(str(error)))
    told.page.on("request", lambda request: told.requests.append(request.url))
    told.page.goto(file.as_uri())
    return told


def pdf_pages(pdf: bytes) -> list[tuple[float, float]]:
    """Returns the size of each page of a PDF, in points."""
    boxes = re.findall(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", pdf)
    return [(float(width), float(height)) for width, height in boxes]


def background(page: Page) -> str:
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


def contrast(page: Page, selector: str, ink: str = "color") -> float:
    """Returns the contrast of a text with what is behind it, as WCAG 2 defines it."""
    return float(
        page.evaluate(
            """([selector, ink]) => {
              const light = (colour) => {
                const parts = colour.match(/[\\d.]+/g).slice(0, 3).map(Number).map((part) => part / 255)
                  .map((part) => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
                return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
              };
              const element = document.querySelector(selector);
              let behind = element;
              while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
              const pair = [getComputedStyle(element)[ink], getComputedStyle(behind).backgroundColor].map(light);
              return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
            }""",
            [selector, ink],
        )
    )
