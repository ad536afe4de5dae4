"""A browser that is installed: Playwright's own Chromium, or the system's."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

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
