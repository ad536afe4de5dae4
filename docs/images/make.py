"""Makes the pictures of the README: `python docs/images/make.py`, from the study that the tests have recorded.

`terminal.svg` is the live table in the middle of that study, `report.png` its report in Chromium.
"""

import io
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright
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
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(paths.report.as_uri())
        page.wait_for_function("() => [...document.querySelectorAll('.plot')].every(p => p.querySelector('.main-svg'))")
        page.screenshot(path=HERE / "report.png")
        browser.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        study = recorded_study(Path(folder))
        draw_terminal(study)
        draw_report(study)
