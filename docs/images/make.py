"""Makes the pictures of the documents.

`python docs/images/make.py` makes those of the README from the study that the tests have recorded. `terminal.svg` is
the live table in the middle of that study, `report.png` its report in Chromium.

`python docs/images/make.py PLAN` makes `plan.png` from the page of a plan in its folder, and leaves the others.
"""

import contextlib
import io
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Page, sync_playwright
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / "tests"), str(HERE.parents[1])]

from report_fixtures import recorded_study  # noqa: E402

from flows.live import LiveView  # noqa: E402
from trial_lib.records.study_folder import StudyPaths, StudyRecord  # noqa: E402
from trial_lib.report.read_study import read_study  # noqa: E402
from trial_lib.report.write_report import write_report  # noqa: E402
from trial_lib.study.arguments import StudyArguments  # noqa: E402

LINES = 28  # of the history: a trial runs
WIDTH, HEIGHT = 1100, 1680


def draw_terminal(paths: StudyPaths) -> None:
    """Draws what the live view showed after so many lines of the history."""
    record = StudyRecord.model_validate_json(paths.record.read_text())
    ended = read_study(paths.root).trials[LINES // 2 - 1].ended
    lines = paths.history.read_text().splitlines(keepends=True)
    paths.history.write_text("".join(lines[: LINES + 1]))
    view = LiveView(paths, StudyArguments.model_validate(record.arguments))
    view._started = time.monotonic() - ended
    view._message = ""
    view._read()
    console = Console(record=True, width=108, file=io.StringIO())
    console.print(
        "$ zerotune tune --free-batch --max-micro-batch 64 -m throughput -- deepspeed --num_gpus 2 raw_engine.py ...",
        style="bold",
        highlight=False,
    )
    console.print(view._picture())
    # The reader's own fonts: none is fetched.
    plain = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    console.save_svg(str(HERE / "terminal.svg"), title="zerotune", code_format=plain)
    paths.history.write_text("".join(lines))


def draw_report(paths: StudyPaths) -> None:
    """Takes a picture of the report's upper part."""
    write_report(paths)
    with open_page(paths.report) as page:
        page.screenshot(path=HERE / "report.png")


def draw_plan(page_of_a_plan: Path) -> None:
    """Takes a picture of a plan's answer, and of the figures of its devices."""
    with open_page(page_of_a_plan) as page:
        # The command has the paths of this host. The table is long, and a terminal shows it too.
        page.evaluate("document.querySelectorAll('[aria-labelledby=use], section.long').forEach(e => e.remove())")
        last = page.locator("section:has([id^=plot-time])").first.bounding_box()
        assert last is not None
        height = last["y"] + last["height"] + 8
        page.set_viewport_size({"width": WIDTH, "height": round(height)})
        page.screenshot(path=HERE / "plan.png")


@contextlib.contextmanager
def open_page(file: Path) -> Iterator[Page]:
    """Opens a page in Chromium, and waits until its figures are drawn."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(file.resolve().as_uri())
        page.wait_for_function("() => [...document.querySelectorAll('.plot')].every(p => p.querySelector('.main-svg'))")
        yield page
        browser.close()


if __name__ == "__main__":
    if sys.argv[1:]:
        draw_plan(Path(sys.argv[1]) / "report.html")
        sys.exit()
    with tempfile.TemporaryDirectory() as folder:
        study = recorded_study(Path(folder))
        draw_terminal(study)
        draw_report(study)
