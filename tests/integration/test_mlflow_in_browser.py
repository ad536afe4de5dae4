"""What a person sees of a study in MLflow, in a real browser: the links that ZeroTune prints lead to its trials."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, Page, expect
from report_fixtures import STUDY_ID, study_with_failures, with_results
from server_fixtures import Server, mlflow_server

from zerotune.trial_lib.records.folders import StudyPaths, StudyRecord
from zerotune.trial_lib.tracking.sync import StudySync, Tracker

pytestmark = pytest.mark.long

DESK = {"width": 1440, "height": 900}
BEST = ("0003 z0-mbs64", "479.02")
TRIALS, COMPLETED = 38, 35  # beside the study's own run
READY_MS = 60_000  # MLflow's pages are some megabytes of code


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> StudyPaths:
    return with_results(study_with_failures(tmp_path_factory.mktemp("study")))


@pytest.fixture(scope="module")
def server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("mlflow")
    server = mlflow_server(folder, f"sqlite:///{folder}/mlflow.db")
    try:
        yield server.wait_until_ready()
    finally:
        server.kill()


@pytest.fixture(scope="module")
def tracker(study: StudyPaths, server: Server) -> Tracker:
    tracker = Tracker(lambda: StudySync(study, server.url), server.url)
    tracker.start()
    assert tracker.close(timeout_s=120), tracker.last_error
    return tracker


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    # Of its own: MLflow remembers in the browser what a person looked at last.
    context = browser.new_context(viewport=DESK)
    context.set_default_timeout(READY_MS)
    expect.set_options(timeout=READY_MS)
    yield context.new_page()
    context.close()


def is_seen(element: Locator) -> bool:
    """Returns whether an element is within the window."""
    box = element.bounding_box()
    return box is not None and 0 <= box["x"] <= box["x"] + box["width"] <= DESK["width"] and box["y"] < DESK["height"]


def column(page: Page, name: str) -> list[str]:
    """Returns what a column of the table shows from its top row down."""
    cells = page.locator(f"[role=row][row-index] [col-id*='{name}']")
    placed = [(cell.bounding_box(), cell.inner_text()) for cell in cells.all()]
    return [text for _, text in sorted((box["y"], text) for box, text in placed if box is not None)]


def test_the_printed_link_shows_the_answer_and_then_the_trials_best_first(
    page: Page, tracker: Tracker, study: StudyPaths
) -> None:
    [link] = tracker.ways
    page.goto(link)
    name, value = BEST
    best = page.get_by_role("link", name=name)
    expect(best).to_be_visible()
    expect(page.get_by_text(f"{TRIALS + 1} matching runs")).to_be_visible()
    cell = page.locator("[role=row][row-index] [col-id*='samples_per_s']").first
    expect(cell).to_be_visible()
    assert is_seen(best)
    assert is_seen(cell)
    assert is_seen(page.locator(".ag-header-cell[col-id*='samples_per_s']"))
    # The answer first, then the run of the study, then the readings, the luckiest of which may be above the answer's.
    answer = StudyRecord.model_validate_json(study.record.read_text()).best_number
    rows = [page.get_by_role("link", name=each) for each in (f"{answer:04d} confirm-z0-mbs64", STUDY_ID, name)]
    heights = [box["y"] for row in rows if (box := row.first.bounding_box()) is not None]
    assert len(heights) == 3
    assert heights == sorted(heights)
    assert column(page, "winner")[:3] == ["winner", "-", "-"]
    values = column(page, "samples_per_s")[2:]
    assert values[0] == value
    measured = [float(shown) for shown in values if shown != "-"]
    assert len(measured) > 10
    assert measured == sorted(measured, reverse=True)
    assert values[len(measured) :] == ["-"] * (len(values) - len(measured))


def test_a_click_further_the_charts_are_of_the_search(page: Page, tracker: Tracker) -> None:
    [link] = tracker.ways
    page.goto(link)
    page.locator("label", has=page.locator("input[value=CHART]")).click()
    expect(page.get_by_text("The search")).to_be_visible()
    expect(page.get_by_text("Model metrics")).to_be_visible()
    for drawn in (page.locator(".js-plotly-plot .bars .point"), page.locator(".js-plotly-plot .scatterlayer .point")):
        expect(drawn.nth(COMPLETED - 1)).to_be_visible()
        assert is_seen(drawn.first)


def test_the_page_of_the_study_begins_with_the_answer(page: Page, tracker: Tracker, study: StudyPaths) -> None:
    [link] = tracker.run_ways
    page.goto(link)
    record = StudyRecord.model_validate_json(study.record.read_text())
    answer = page.get_by_text(record.finding, exact=True).first
    expect(answer).to_be_visible()
    expect(page.get_by_role("link", name="Traces").or_(page.get_by_text("Model training")).first).to_be_visible()


def test_the_view_is_in_the_menu_of_views(page: Page, tracker: Tracker) -> None:
    [link] = tracker.ways
    page.goto(f"{link.partition('&')[0]}")
    page.get_by_test_id("saved-views-trigger").click()
    page.get_by_text(f"Trials of {STUDY_ID}").click()
    expect(page.get_by_role("link", name=BEST[0])).to_be_visible()
    expect(page.locator("[role=row][row-index] [col-id*='samples_per_s']").first).to_be_visible()
    assert column(page, "samples_per_s")[2] == BEST[1]
