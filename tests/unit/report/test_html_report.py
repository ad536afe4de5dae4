"""The report as text: one file that holds all it needs. What a browser makes of it: `test_report_in_browser`."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from report_fixtures import MARKUP, SECRET, only_history, recorded_study, study_with_failures

from zerotune.trial_lib.inputs.known_secrets import KnownSecrets
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.records.units import duration
from zerotune.trial_lib.report.chart import Points
from zerotune.trial_lib.report.html_report import render_figures, render_report, write_report
from zerotune.trial_lib.report.read_study import read_study
from zerotune.trial_lib.report.study_figures import draw_figures


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> StudyPaths:
    return study_with_failures(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def page(failed: StudyPaths) -> str:
    view = read_study(failed.root, KnownSecrets.of_study(failed))
    return render_report(view, draw_figures(view))


def test_the_page_refers_to_nothing_outside_itself(page: str) -> None:
    references = re.findall(r'(?:src|href|url)\s*[=(]\s*["\']?([^"\'\s>)]+)', page)
    assert all(reference.startswith(("#", "data:", "x")) for reference in references), references
    assert "@import" not in page


def test_it_is_small_for_what_it_holds(page: str) -> None:
    assert len(page) < 250_000


def test_what_a_program_prints_is_text_on_the_page(page: str) -> None:
    assert MARKUP not in page
    assert "&lt;script&gt;document.title" in page
    assert page.count("</script>") == 2


def test_no_secret_is_on_the_page(page: str) -> None:
    assert SECRET not in page
    assert "hunter22" not in page


def test_the_answer_comes_first(page: str) -> None:
    places = [
        page.index(text) for text in ("95 % CI 2.19 to 2.92", "Use it", "Throughput against", "What did not complete")
    ]
    assert places == sorted(places)


def test_every_trial_is_there_with_its_outcome_and_reason(page: str) -> None:
    for number in range(38):
        assert f'id="trial-{number}"' in page
    assert page.count("out of memory</span>") == 3  # two trials, and what they have in common
    assert "can&#39;t allocate memory" in page


@pytest.mark.parametrize("lines", [0, 1, 2, 4, 20])
def test_a_study_that_found_nothing_has_a_report_as_well(lines: int, tmp_path: Path) -> None:
    paths = recorded_study(tmp_path, status="failed", reason="It failed.")
    only_history(paths, lines)
    write_report(paths)
    page = paths.report.read_text()
    assert "No configuration was found." in page
    assert "It failed." in page
    assert "Use it" not in page


def test_each_figure_is_a_page_of_its_own_as_well(tmp_path: Path) -> None:
    paths = recorded_study(tmp_path)
    write_report(paths)
    assert {file.name for file in paths.figures.iterdir()} == {
        "throughput.html",
        "memory.html",
        "progress.html",
        "knobs.html",
    }
    view = read_study(paths.root)
    assert render_figures(view, draw_figures(view))["memory"] == (paths.figures / "memory.html").read_text()


def test_every_figure_has_its_numbers_as_a_table(failed: StudyPaths) -> None:
    for drawn in draw_figures(read_study(failed.root)):
        assert drawn.figure is not None
        assert drawn.rows
        assert {len(row) for row in drawn.rows} == {len(drawn.columns)}


def test_throughput_is_drawn_by_arm_with_intervals_and_the_confirmed_ones_apart(failed: StudyPaths) -> None:
    throughput, *_ = draw_figures(read_study(failed.root))
    assert throughput.figure is not None
    marks = {mark.name: mark for mark in throughput.figure.marks if isinstance(mark, Points)}
    assert set(marks) == {
        *("z0", "z1", "z2", "z3"),
        "confirmed: your configuration",
        "confirmed: ZeRO 0, micro-batch 64, accumulation 2",
    }
    assert all(any(low < high for low, high in mark.ends) for mark in marks.values())


def test_memory_is_drawn_as_predicted_and_measured_and_what_failed_is_marked(failed: StudyPaths) -> None:
    _, memory, *_ = draw_figures(read_study(failed.root))
    assert memory.figure is not None
    marks = {mark.name: mark for mark in memory.figure.marks}
    assert len(marks["predicted (90 %)"].x) == 37
    assert len(marks["measured"].x) == 34
    assert [text[:4] for text in marks["did not complete"].texts] == ["0035", "0036", "0037"]
    # Of so large a budget only the name fits.
    assert "budget" in memory.figure.words[0]


def test_a_budget_near_what_trials_take_is_a_line_above_them(failed: StudyPaths) -> None:
    view = read_study(failed.root)
    most = max(trial.memory.measured or 0 for trial in view.trials if trial.memory is not None)
    near = tuple(
        replace(trial, memory=trial.memory and replace(trial.memory, budget=most + 2**20)) for trial in view.trials
    )
    figure = next(drawn for drawn in draw_figures(replace(view, trials=near)) if drawn.key == "memory").figure
    assert figure is not None
    (budget,) = [mark for mark in figure.marks if mark.name == "budget"]
    assert set(budget.y) == {most / 2**20 + 1}
    assert figure.y.ends[1] > most / 2**20 + 1


def test_where_the_metric_is_no_throughput_its_readings_have_no_interval_that_looks_like_certainty(
    tmp_path: Path,
) -> None:
    paths = recorded_study(tmp_path, metric="latency")
    paths.best_ds_metrics.write_text(
        paths.best_ds_metrics.read_text().replace('"metric": "throughput"', '"metric": "latency"')
    )
    view = read_study(paths.root)
    assert [again.throughput.has_ends for again in view.confirmed if again.throughput] == [False, False]
    drawn = draw_figures(view)
    page = render_report(view, drawn)
    assert "159.9 [" not in page
    assert "their bars are intervals" not in page


def test_the_trials_that_effects_are_taken_from_are_counted_without_the_profile(failed: StudyPaths) -> None:
    view = read_study(failed.root)
    measured = [trial for trial in view.trials if trial.row.value is not None and not trial.is_profile]
    knobs = next(drawn for drawn in draw_figures(view) if drawn.key == "knobs")
    assert f"from {len(measured)} trials." in knobs.says


def test_the_best_so_far_never_falls(failed: StudyPaths) -> None:
    drawn = draw_figures(read_study(failed.root))[2]
    assert drawn.figure is not None
    levels = list(drawn.figure.marks[0].y)
    assert levels == sorted(levels)
    assert drawn.rows[-1][-1] == "479.0 samples/s"


def test_flops_have_a_unit_that_people_read(tmp_path: Path) -> None:
    view = read_study(recorded_study(tmp_path, metric="FLOPS_per_gpu").root)
    drawn = draw_figures(view)
    page = render_report(view, drawn)
    card = r'<dt>FLOPS_per_gpu</dt>\s*<dd>38\.7 <span class="unit">GFLOP/s</span><small>yours: 14\.1 GFLOP/s</small>'
    assert re.search(card, page)
    assert re.search(r'data-label="FLOPS_per_gpu">42\.2 GFLOP/s<', page)
    progress = next(each for each in drawn if each.key == "progress")
    assert progress.figure is not None
    assert progress.figure.y.name == "FLOPS_per_gpu (GFLOP/s)"
    assert max(progress.figure.marks[0].y) == pytest.approx(42.2, abs=0.05)
    assert progress.rows[-1][-1] == "42.2 GFLOP/s"


@pytest.mark.parametrize(("seconds", "said"), [(0.4, "0 s"), (61, "1 min 01 s"), (3900, "1 h 05 min")])
def test_durations_read_as_people_say_them(seconds: float, said: str) -> None:
    assert duration(seconds) == said
