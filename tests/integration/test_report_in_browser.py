"""The report in a real browser: without a network, on a desk and on a phone, by day and by night."""

from pathlib import Path

import pytest
from browser_fixtures import A4, DESK, PAPER, PHONE, Opened, background, contrast, opened, pdf_pages
from playwright.sync_api import Browser, Locator, expect
from report_fixtures import CRASH, STUDY_ID, only_history, recorded_study, study_with_failures

from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.report.html_report import write_report

ANSWER = "2.53x faster than your configuration (95 % CI 2.19 to 2.92): ZeRO 0, micro-batch 64, accumulation 2"
FIGURES = ["throughput", "memory", "progress", "knobs"]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> StudyPaths:
    paths = study_with_failures(tmp_path_factory.mktemp("study"))
    write_report(paths)
    return paths


@pytest.fixture(scope="module")
def desk(browser: Browser, study: StudyPaths) -> Opened:
    return opened(browser, study.report)


@pytest.fixture(scope="module")
def phone(browser: Browser, study: StudyPaths) -> Opened:
    return opened(browser, study.report, PHONE, touch=True)


@pytest.mark.parametrize("where", ["desk", "phone"])
def test_it_opens_without_an_error_and_asks_for_nothing(
    where: str, study: StudyPaths, request: pytest.FixtureRequest
) -> None:
    told = request.getfixturevalue(where)
    assert told.errors == []
    assert told.requests == [study.report.as_uri()]


@pytest.mark.parametrize("where", ["desk", "phone"])
def test_the_answer_is_seen_without_scrolling(where: str, request: pytest.FixtureRequest) -> None:
    page = request.getfixturevalue(where).page
    heading = page.get_by_role("heading", level=1)
    assert heading.inner_text() == ANSWER
    height = page.viewport_size["height"]
    for element in (heading, page.get_by_text("interval 2.19 to 2.92"), page.locator("#command")):
        box = element.bounding_box()
        assert box is not None
        assert box["y"] + min(box["height"], 40) < height


@pytest.mark.parametrize("where", ["desk", "phone"])
def test_nothing_has_to_be_scrolled_sideways(where: str, request: pytest.FixtureRequest) -> None:
    page = request.getfixturevalue(where).page
    page.evaluate("document.querySelectorAll('details').forEach(details => { details.open = true; })")
    # Not innerWidth: a phone's grows with what is too wide for it.
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    page.evaluate("document.querySelectorAll('details').forEach(details => { details.open = false; })")


@pytest.mark.parametrize(("size", "shown"), [pytest.param(DESK, "desk", marks=pytest.mark.long), (PHONE, "phone")])
def test_every_figure_is_seen_without_a_script(
    browser: Browser, study: StudyPaths, size: tuple[int, int], shown: str
) -> None:
    page = opened(browser, study.report, size, scripts=False).page
    for key in FIGURES:
        figure = page.locator(f"#plot-{key}")
        assert figure.get_attribute("aria-label")
        drawn = figure.locator("svg:visible").first
        assert drawn.get_attribute("class") == shown
        assert drawn.locator(".point, .bar").count() > 2, key
        box = drawn.bounding_box()
        assert box is not None
        assert 250 < box["width"] <= size[0]
        for word in drawn.locator("text").all():
            inner = word.bounding_box()
            assert inner is not None
            assert box["x"] - 1 <= inner["x"], word.text_content()
            assert inner["x"] + inner["width"] <= box["x"] + box["width"] + 1, word.text_content()
            assert inner["height"] >= 13, word.text_content()
    assert page.locator(f"#plot-throughput .{shown} .interval").count() > 20


@pytest.mark.long
def test_in_the_dark_it_is_dark_and_all_is_readable(browser: Browser, study: StudyPaths, desk: Opened) -> None:
    dark = opened(browser, study.report, scheme="dark")
    assert background(desk.page) != background(dark.page)
    for page in (desk.page, dark.page):
        for selector in (
            "h1",
            ".cards dt",
            ".gain",
            "section > p",
            ".outcome.crashed",
            "a[href^='#trial']",
            "#command",
        ):
            assert contrast(page, selector) >= 4.5, selector
        for words in ("#plot-memory .note", "#plot-progress .note", "#plot-knobs .tick"):
            assert contrast(page, words, "fill") >= 4.5, words
    ink = "getComputedStyle(document.querySelector('#plot-memory .tick')).fill"
    assert desk.page.evaluate(ink) != dark.page.evaluate(ink)
    # Somebody switches while it is open.
    before = dark.page.evaluate(ink)
    dark.page.emulate_media(color_scheme="light")
    dark.page.wait_for_function(f"() => {ink} !== '{before}'")
    assert dark.errors == []


def test_what_a_program_printed_does_nothing_to_the_page(desk: Opened) -> None:
    assert desk.page.title().startswith("programs: ")
    trial = desk.page.locator(f"#trial-{CRASH}")
    trial.locator("summary").click()
    assert "<script>document.title" in trial.locator("pre").inner_text()


def test_a_failure_leads_to_its_trial_and_that_to_its_log(desk: Opened) -> None:
    desk.page.get_by_role("link", name="0036").click()
    trial = desk.page.locator("#trial-36")
    box = trial.bounding_box()
    assert box is not None
    assert -1 <= box["y"] < DESK[1]
    trial.locator("summary").click()
    assert trial.locator("pre").inner_text() == "rank 1 gave up at 96"


def test_it_can_be_walked_by_keyboard_and_named_by_a_screen_reader(desk: Opened) -> None:
    assert desk.page.get_by_role("region", name="Every trial").count() == 1
    assert desk.page.get_by_role("columnheader", name="outcome").count() == 1
    unnamed = "[...document.querySelectorAll('button, a, summary')].filter(e => !e.textContent.trim()).length"
    assert desk.page.evaluate(unnamed) == 0
    desk.page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    desk.page.locator(".skip").focus()
    assert desk.page.evaluate("getComputedStyle(document.activeElement).left") == "8px"


@pytest.mark.long
def test_a_figure_s_own_page_works_alone(browser: Browser, study: StudyPaths) -> None:
    told = opened(browser, study.figures / "throughput.html", PHONE)
    assert (told.errors, told.requests) == ([], [(study.figures / "throughput.html").as_uri()])
    assert told.page.locator("#plot-throughput .phone .interval").count() > 20
    assert told.page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]


@pytest.mark.long
def test_another_study_s_report_is_laid_beside_it_without_a_server(
    browser: Browser, study: StudyPaths, tmp_path: Path
) -> None:
    other = recorded_study(tmp_path, metric="latency")
    write_report(other)
    told = opened(browser, study.report)
    chosen = told.page.get_by_label("Its report")
    chosen.set_input_files(other.report)
    rows = {row.locator("th").inner_text(): row.locator("td").all_inner_texts() for row in shown_rows(told)}
    assert rows["study"] == [STUDY_ID, STUDY_ID]
    assert rows["gain"] == ["2.53x (2.19 to 2.92)"] * 2
    assert rows["throughput, winner"][1] == "-"
    assert "deepspeed" not in rows  # both ran with the same
    file = tmp_path / "report.html"
    file.write_text("<html>another page</html>")
    chosen.set_input_files(file)
    expect(told.page.get_by_text("report.html is no report of a study")).to_be_visible()
    assert (shown_rows(told), told.errors) == ([], [])
    assert told.requests == [study.report.as_uri()]


def shown_rows(told: Opened) -> list[Locator]:
    told.page.wait_for_timeout(300)
    return told.page.locator("#compared:visible tbody tr").all()


def test_a_study_that_found_nothing_has_a_page_that_says_why(browser: Browser, tmp_path: Path) -> None:
    paths = recorded_study(tmp_path, status="failed", reason="The profile trial crashed.")
    only_history(paths, 2)
    write_report(paths)
    told = opened(browser, paths.report, PHONE)
    assert told.errors == []
    assert told.page.get_by_role("heading", level=1).inner_text() == "No configuration was found."
    assert told.page.get_by_text("The profile trial crashed.").is_visible()


@pytest.fixture(scope="module")
def printed(browser: Browser, study: StudyPaths) -> Opened:
    """The report as it goes to paper, from a dark and narrow window."""
    told = opened(browser, study.report, PHONE, scheme="dark")
    told.page.emulate_media(media="print")
    told.page.set_viewport_size({"width": PAPER[0], "height": PAPER[1]})
    return told


@pytest.mark.long
def test_on_paper_each_figure_is_whole(printed: Opened) -> None:
    for key in FIGURES:
        plot = printed.page.locator(f"#plot-{key}")
        outer = plot.bounding_box()
        assert outer is not None
        assert 0 <= outer["x"] <= outer["x"] + outer["width"] <= PAPER[0]
        drawing = plot.locator("svg:visible").first
        box = drawing.bounding_box()
        assert box is not None
        assert box["width"] == pytest.approx(outer["width"], abs=1), key
        assert 200 < box["height"] <= PAPER[1], key
        assert drawing.locator(".point, .bar").count() > 2, key


def test_on_paper_it_is_light_and_nothing_is_folded_away_that_is_short(printed: Opened) -> None:
    assert printed.page.evaluate("getComputedStyle(document.body).color") == "rgb(26, 31, 39)"
    ink = "getComputedStyle(document.querySelector('#plot-memory .tick')).fill"
    assert printed.page.evaluate(ink) == "rgb(26, 31, 39)"
    assert printed.page.locator("#config").is_visible()
    assert printed.page.locator("button:visible, summary:visible").count() == 0
    assert printed.page.evaluate("document.documentElement.scrollWidth") <= PAPER[0]


@pytest.mark.long
def test_page_one_of_a_pdf_is_the_answer(browser: Browser, study: StudyPaths, tmp_path: Path) -> None:
    told = opened(browser, study.report, scheme="dark")
    pdf = told.page.pdf(format="A4")
    pages = pdf_pages(pdf)
    assert 4 <= len(pages) <= 9
    assert all(size == pytest.approx(A4, abs=1) for size in pages)
    # The first page alone has the answer, what to type, what changes, and how sure that is.
    told.page.emulate_media(media="print")
    told.page.set_viewport_size({"width": PAPER[0], "height": PAPER[1]})
    for element in ("#answer", ".cards", "#command", ".changes", "[aria-labelledby=sure]"):
        box = told.page.locator(element).bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= PAPER[1], element
    assert told.errors == []
