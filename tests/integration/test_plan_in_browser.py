"""The page of a plan in a real browser: without a network, on a desk and on a phone, by night and on paper."""

import pytest
from browser_fixtures import A4, DESK, PAPER, PHONE, Opened, background, contrast, opened, pdf_pages
from plan_fixtures import plan_by_hand, plan_folder
from playwright.sync_api import Browser

from zerotune.trial_lib.plan.plan_record import PlanPaths
from zerotune.trial_lib.report.plan_page import write_plan_page

OF_H100 = ("line-h100-80gb-8", "memory-h100-80gb-8", "time-h100-80gb-8")
OF_A100 = ("line-a100-40gb-2x8", "host-a100-40gb-2x8", "memory-a100-40gb-2x8", "time-a100-40gb-2x8")
FIGURES = [*OF_H100, *OF_A100, "speed", "memory-counts"]
WORDS = "> svg:visible text"

# The phone of a report's figures is in `test_report_in_browser.py`.
PLACES = ["desk", pytest.param("phone", marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> PlanPaths:
    paths = plan_folder(tmp_path_factory.mktemp("plan"))
    write_plan_page(paths)
    return paths


@pytest.fixture(scope="module")
def desk(browser: Browser, plan: PlanPaths) -> Opened:
    return opened(browser, plan.report)


@pytest.fixture(scope="module")
def phone(browser: Browser, plan: PlanPaths) -> Opened:
    return opened(browser, plan.report, PHONE, touch=True)


@pytest.mark.parametrize("where", PLACES)
def test_it_opens_without_an_error_and_asks_for_nothing(
    where: str, plan: PlanPaths, request: pytest.FixtureRequest
) -> None:
    told = request.getfixturevalue(where)
    assert told.errors == []
    assert told.requests == [plan.report.as_uri()]
    assert told.page.title().startswith("llama-8b: ")


@pytest.mark.parametrize("where", PLACES)
def test_the_answer_is_seen_without_scrolling_and_is_labelled(where: str, request: pytest.FixtureRequest) -> None:
    page = request.getfixturevalue(where).page
    heading = page.get_by_role("heading", level=1)
    assert heading.inner_text() == plan_by_hand().answer
    for element in (heading, page.get_by_text("foreseen, not measured"), page.locator("#command")):
        box = element.bounding_box()
        assert box is not None
        assert box["y"] + min(box["height"], 40) < page.viewport_size["height"]


@pytest.mark.parametrize("where", PLACES)
def test_nothing_has_to_be_scrolled_sideways(where: str, request: pytest.FixtureRequest) -> None:
    page = request.getfixturevalue(where).page
    page.evaluate("document.querySelectorAll('details').forEach(details => { details.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    page.evaluate("document.querySelectorAll('details').forEach(details => { details.open = false; })")


@pytest.mark.long
@pytest.mark.parametrize("where", PLACES)
def test_every_figure_is_drawn_and_no_word_is_cut_off(where: str, request: pytest.FixtureRequest) -> None:
    page = request.getfixturevalue(where).page
    for key in FIGURES:
        plot = page.locator(f"#plot-{key}")
        assert plot.get_attribute("aria-label")
        assert plot.locator("> svg:visible").locator(".point, .bar, path[fill-opacity]").count() > 2, key
        outer = plot.bounding_box()
        assert outer is not None
        for word in plot.locator(WORDS).all():
            inner = word.bounding_box()
            assert inner is not None
            assert outer["x"] - 1 <= inner["x"], (key, word.text_content())
            assert inner["x"] + inner["width"] <= outer["x"] + outer["width"] + 1, (key, word.text_content())
            assert inner["y"] + inner["height"] <= outer["y"] + outer["height"] + 1, (key, word.text_content())


@pytest.mark.long
@pytest.mark.parametrize("where", PLACES)
def test_no_name_lies_on_another_one(where: str, request: pytest.FixtureRequest) -> None:
    page = request.getfixturevalue(where).page
    for key in FIGURES:
        words = page.locator(f"#plot-{key}").locator(WORDS).all()
        boxes = [(word.text_content(), box) for word in words if (box := word.bounding_box()) and box["width"]]
        for index, (one, mine) in enumerate(boxes):
            for other, its in boxes[index + 1 :]:
                across = min(mine["x"] + mine["width"], its["x"] + its["width"]) - max(mine["x"], its["x"])
                down = min(mine["y"] + mine["height"], its["y"] + its["height"]) - max(mine["y"], its["y"])
                assert across <= 2 or down <= 4, (key, one, other)


def test_the_areas_of_a_step_lie_on_one_another(desk: Opened) -> None:
    step = desk.page.locator("#plot-line-h100-80gb-8")
    assert step.locator(".desk path[fill-opacity]").count() >= 6
    moments = [word.text_content() for word in step.locator(".desk .band").all()]
    assert moments == ["load", "forward", "backward", "update"]


@pytest.mark.long
def test_by_night_it_is_dark_and_all_is_readable(browser: Browser, plan: PlanPaths, desk: Opened) -> None:
    dark = opened(browser, plan.report, scheme="dark")
    assert background(desk.page) != background(dark.page)
    for page in (desk.page, dark.page):
        for selector in ("h1", ".status.foreseen", "section > p", ".arms small", ".why", ".arms .outcome", ".mark"):
            assert contrast(page, selector) >= 4.5, selector
        for words in (".note", ".legend", ".tick"):
            assert contrast(page, f"#plot-line-h100-80gb-8 {words}", "fill") >= 4.5, words
            assert contrast(page, f"#plot-memory-h100-80gb-8 {words}", "fill") >= 4.5, words
    assert dark.errors == []


@pytest.mark.long
def test_on_paper_each_figure_is_whole(browser: Browser, plan: PlanPaths) -> None:
    told = opened(browser, plan.report, PHONE, scheme="dark")
    told.page.emulate_media(media="print")
    told.page.set_viewport_size({"width": PAPER[0], "height": PAPER[1]})
    assert told.page.evaluate("document.documentElement.scrollWidth") <= PAPER[0]
    for key in FIGURES:
        plot = told.page.locator(f"#plot-{key}")
        outer = plot.bounding_box()
        assert outer is not None
        for word in plot.locator(WORDS).all():
            inner = word.bounding_box()
            assert inner is not None
            assert inner["x"] + inner["width"] <= outer["x"] + outer["width"] + 1, (key, word.text_content())
            assert inner["y"] + inner["height"] <= outer["y"] + outer["height"] + 1, (key, word.text_content())


@pytest.mark.long
def test_a_pdf_has_pages_of_a4(browser: Browser, plan: PlanPaths) -> None:
    told = opened(browser, plan.report, DESK, scheme="dark")
    pages = pdf_pages(told.page.pdf(format="A4"))
    assert 5 <= len(pages) <= 11
    assert all(size == pytest.approx(A4, abs=1) for size in pages)
    assert told.errors == []
