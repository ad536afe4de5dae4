"""The page of a plan as text, and its figures. What a browser makes of it: `test_plan_in_browser`."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from plan_fixtures import GIB, MARKUP, SECRET, devices_by_hand, plan_by_hand, plan_folder, run_by_hand

from zerotune.trial_lib.plan.answer import likelihood
from zerotune.trial_lib.plan.plan_record import PlannedRange, PlannedTraining, PlanPaths, TrainingRow, write_run
from zerotune.trial_lib.report.chart import Area, Bars, Curve, Drawn, Points
from zerotune.trial_lib.report.plan_figures import (
    HOST,
    arms_memory_figure,
    arms_time_figure,
    count_memory_figure,
    figure_text,
    host_figure,
    line_figure,
    speed_figure,
    step_line,
    training_figure,
)
from zerotune.trial_lib.report.plan_page import render_plan, step_run, write_plan_page

H100 = devices_by_hand("h100-80gb", 79.1)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> PlanPaths:
    paths = plan_folder(tmp_path_factory.mktemp("plan"))
    write_plan_page(paths)
    return paths


@pytest.fixture(scope="module")
def page(paths: PlanPaths) -> str:
    return paths.report.read_text()


def all_figures() -> list[Drawn]:
    line, host = step_line(run_by_hand(4)), step_line(run_by_hand(4, offload=True), HOST)
    assert line is not None
    assert host is not None
    figures = [line_figure(H100, line), host_figure(H100, host), arms_memory_figure(H100), arms_time_figure(H100)]
    return [*figures, speed_figure([H100], ""), count_memory_figure([H100])]


def test_the_page_refers_to_nothing_outside_itself_and_is_small(page: str) -> None:
    references = re.findall(r'(?:src|href|url)\s*[=(]\s*["\']?([^"\'\s>)]+)', page)
    assert all(reference.startswith(("#", "data:", "x")) for reference in references), references
    assert len(page) < 400_000


def test_the_answer_comes_first_and_all_is_labelled_foreseen(page: str) -> None:
    texts = ("foreseen, not measured", "It fits with 94 %.</h1>", "Start there", "All arms")
    places = [page.index(text) for text in texts]
    assert places == sorted(places)
    assert page.index("8 x h100-80gb, foreseen") < page.index("16 x a100-40gb on 2 hosts, foreseen")
    assert "Nothing on this page was measured on these devices." in page


def test_the_whole_training_has_its_table_and_a_picture_of_hours_and_price(tmp_path: Path) -> None:
    rows = tuple(
        TrainingRow(
            device="h100-80gb",
            devices=f"h100-80gb:{count}",
            count=count,
            label="z2",
            micro_batch=4,
            accumulation=2,
            fits=0.97,
            hours=PlannedRange(value=48 / count, low=30 / count, high=80 / count),
            price=PlannedRange(value=144, low=90, high=240),
            marks=("cheapest",) if count == 2 else (),
            is_best=count == 2,
        )
        for count in (1, 2, 4)
    )
    whole = PlannedTraining(length="3 epochs", within=40, rows=rows, answer="The cheapest devices: two.")
    paths = plan_folder(tmp_path / "plan", plan_by_hand(whole=whole))
    write_plan_page(paths)
    page = paths.report.read_text()
    assert "3 epochs. Hours are those of optimizer steps." in page
    assert "The cheapest devices: two." in page
    # The table has the rows with a mark, the picture all.
    assert page.count('<th scope="row">h100-80gb:') == 1
    assert {f"h100-80gb:{count}: " in page for count in (1, 2, 4)} == {True}
    drawn = training_figure(whole)
    assert drawn.figure is not None
    assert [level.text for level in drawn.figure.levels] == ["40 hours"]
    unpriced = whole.model_copy(update={"rows": tuple(row.model_copy(update={"price": None}) for row in rows)})
    assert training_figure(unpriced).figure is None


def test_markup_is_text_and_no_secret_is_on_the_page(page: str) -> None:
    assert MARKUP not in page
    assert "&lt;script&gt;document.title" in page
    assert page.count("</script>") == 1
    assert SECRET not in page


def test_every_arm_has_a_row_and_one_that_was_not_foreseen_has_its_reason(page: str) -> None:
    table = page[page.index('id="arms-h100-80gb-8"') :]
    table = table[: table.index("</table>")]
    for arm in H100.arms:
        assert f'<th scope="row">{arm.label}' in table
    assert "The program asks for the shape of a mask (train.py:31)." in table
    assert table.count("the answer") == 1
    assert re.search(r"z2 <span class=\"soft\">yours", table)
    assert re.search(r'data-label="tokens/s">38,300<small>30,600 to 45,900</small>', table)


def test_columns_that_no_arm_fills_are_left_out() -> None:
    arms = [arm.model_copy(update={"cost": None, "tokens_per_s": None, "host": 0.0}) for arm in H100.arms]
    page = render_plan(plan_by_hand(devices=(H100.model_copy(update={"arms": tuple(arms)}),), best=0), {})
    page = page[: page.index("Memory of the arms")]
    assert "10⁹ tokens" not in page
    assert "tokens/s</th>" not in page
    assert "on the host</th>" not in page


def test_guesses_are_shown_and_known_answers_are_folded_away(page: str) -> None:
    guesses, known = page.index("These answers are guesses"), page.index("Known answers")
    assert guesses < page.index("mask (train.py:31) &lt;") < known < page.index("clip_grad_norm_")
    known_alone = plan_by_hand(asks=[ask for ask in plan_by_hand().asks if ask.is_known])
    assert "These answers are guesses" not in render_plan(known_alone, {})


def test_a_plan_that_was_stopped_has_a_page_that_says_why() -> None:
    why = "mask (train.py:31) needs the content of a tensor."
    page = render_plan(plan_by_hand(stopped=why, devices=(), best=None, answer="", best_command=""), {})
    assert "The program cannot be foreseen." in page
    assert why in page
    assert "Start there" not in page
    assert page.count("</script>") == 1


def test_devices_on_which_nothing_fits_have_no_step_and_no_time() -> None:
    arms = tuple(arm for arm in H100.arms if not arm.is_likely)
    none = H100.model_copy(update={"arms": arms, "best": "", "fewest": None, "counts": ()})
    page = render_plan(plan_by_hand(devices=(none,), best=None, answer="Nothing fits."), {})
    assert "Memory of one step" not in page
    assert "No arm fits, so there is no step." in page
    assert "It trains on no number of h100-80gb" in page


def test_every_figure_has_its_numbers_as_a_table() -> None:
    for drawn in all_figures():
        assert drawn.figure is not None, drawn.key
        assert drawn.rows, drawn.key
        assert {len(row) for row in drawn.rows} == {len(drawn.columns)}, drawn.key
    assert len({drawn.key for drawn in all_figures()}) == len(all_figures())


def test_the_step_is_stacked_by_kind_with_moments_the_need_and_the_device() -> None:
    drawn = all_figures()[0]
    assert drawn.figure is not None
    areas = [mark for mark in drawn.figure.marks if isinstance(mark, Area)]
    names = [area.name for area in areas]
    assert names[:2] == ["parameters", "optimizer states"]
    line = step_line(run_by_hand(4))
    assert line is not None
    assert max(areas[-1].high) == pytest.approx(line.most / GIB)
    assert [band.text for band in drawn.figure.bands] == ["load", "forward", "backward", "update"]
    assert [level.text for level in drawn.figure.levels] == ["the whole need", "the device: 79.1 GiB"]
    assert "The peak is in the backward pass: 53.4 GiB, of them 34.0 GiB activations" in drawn.says


def test_a_device_far_larger_than_the_need_is_written_and_not_drawn() -> None:
    line = step_line(run_by_hand(4))
    assert line is not None
    large = H100.model_copy(update={"usable": 900.0 * GIB})
    for drawn in (line_figure(large, line), arms_memory_figure(large)):
        assert drawn.figure is not None
        assert any("900.0 GiB" in note.text for note in drawn.figure.notes), drawn.key
        assert max(end for axis in (drawn.figure.x, drawn.figure.y) for end in axis.ends or ()) < 200


def test_a_small_model_s_step_is_not_flattened_by_the_context() -> None:
    line = step_line(run_by_hand(4))
    assert line is not None
    small = replace(line, bytes=tuple(tuple(size / 1000 for size in each) for each in line.bytes))
    drawn = line_figure(H100, small)
    assert drawn.figure is not None
    assert drawn.figure.y.ends is not None
    assert drawn.figure.y.ends[1] < 60  # MiB
    assert drawn.figure.words[-2:] == ["the whole need: 59.1 GiB ↑", "the device: 79.1 GiB ↑"]


def test_a_step_of_another_number_of_micro_batches_says_so() -> None:
    line = step_line(run_by_hand(4, accumulation=2))
    assert line is not None
    assert "The step was foreseen with 2 micro-batches, and the arm's has 4." in line_figure(H100, line).says


def test_speeds_within_a_decade_are_drawn_from_zero_and_others_by_their_logarithm() -> None:
    near = H100.model_copy(update={"counts": H100.counts[:4]})
    for devices, is_log in ((near, False), (H100, True)):
        figure = speed_figure([devices], "").figure
        assert figure is not None
        assert (figure.y.is_log, figure.y.from_zero) == (is_log, not is_log)


def test_numbers_with_another_batch_are_hollow_on_a_dashed_line_and_have_a_column() -> None:
    counts = tuple(
        each.model_copy(update={"other_batch": each.devices}) if each.devices > 128 else each for each in H100.counts
    )
    drawn = speed_figure([H100.model_copy(update={"counts": counts})], "")
    assert drawn.figure is not None
    (dashed,) = [mark for mark in drawn.figure.marks if isinstance(mark, Curve) and mark.dash]
    points = next(mark for mark in drawn.figure.marks if isinstance(mark, Points) and mark.name == "h100-80gb")
    assert [count for count, is_hollow in zip(dashed.x, points.hollow, strict=True) if is_hollow] == [256, 512, 1024]
    assert "another global batch" in drawn.columns
    assert drawn.rows[-1][drawn.columns.index("another global batch")] == "1,024"
    assert "Hollow points" in drawn.says
    plain = speed_figure([H100], "")
    assert plain.figure is not None
    assert not [mark for mark in plain.figure.marks if isinstance(mark, Curve) and mark.dash]
    assert "another global batch" not in plain.columns


def test_numbers_that_are_left_out_have_a_reason() -> None:
    assert "left out" not in speed_figure([H100], "").says
    assert "left out" in speed_figure([H100.model_copy(update={"counts": H100.counts[1:]})], "").says


def test_a_few_bytes_on_the_host_have_no_column_and_no_figure() -> None:
    arms = tuple(arm.model_copy(update={"host": 3.0 * 2**20}) for arm in H100.arms)
    host = step_line(run_by_hand(4, offload=True), HOST)
    page = render_plan(
        plan_by_hand(devices=(H100.model_copy(update={"arms": arms}),), best=0), {H100.label: (None, host)}
    )
    assert "Host memory of that step" not in page
    assert "3.0 MiB</td>" not in page[: page.index("Memory of the arms")]


def test_the_bars_of_an_arm_add_up_to_its_need_and_to_its_step() -> None:
    memory, time = arms_memory_figure(H100), arms_time_figure(H100)
    assert memory.figure is not None
    assert time.figure is not None
    bars = [mark for mark in memory.figure.marks if isinstance(mark, Bars)]
    seen = [arm for arm in H100.arms if arm.peak is not None]
    for index, arm in enumerate(seen):
        assert arm.peak is not None
        assert bars[-1].ends[index] == pytest.approx(arm.peak.value / GIB)
    assert bars[0].faint == [not arm.is_likely for arm in seen]
    assert time.figure.marks[-1].ends[0] == pytest.approx(sum(H100.arms[0].seconds.values()))
    assert "waiting for activations" not in {mark.name for mark in time.figure.marks}


def test_steps_of_different_batches_are_compared_by_the_sample() -> None:
    first, *others = H100.arms
    arms = (first.model_copy(update={"accumulation": 8}), *others)
    drawn = arms_time_figure(H100.model_copy(update={"arms": arms}))
    assert drawn.figure is not None
    assert drawn.figure.x.name == "milliseconds for each sample of a device"
    assert drawn.figure.marks[-1].ends[0] == pytest.approx(1e3 * sum(first.seconds.values()) / 32)


def test_the_curve_has_a_star_at_the_fewest_devices_and_crosses_where_nothing_fits() -> None:
    speed, memory = speed_figure([H100], "The batch stays."), count_memory_figure([H100])
    assert speed.figure is not None
    assert memory.figure is not None
    curve = next(mark for mark in speed.figure.marks if mark.name == "h100-80gb")
    assert list(curve.x) == [2**power for power in range(2, 11)]
    star = next(mark for mark in speed.figure.marks if mark.name == "fewest: 4 x h100-80gb")
    assert (star.x[0], star.y[0]) == (4, curve.y[0])
    assert "The batch stays. The fewest devices on which it trains (star): 4 x h100-80gb." in speed.says
    crosses = next(mark for mark in memory.figure.marks if mark.name == "nothing fits")
    assert list(crosses.x) == [1, 2]
    assert [row[3] for row in speed.rows[:3]] == ["does not fit", "does not fit", "4 x 4"]
    assert speed.rows[2][7] == "100 %"


def test_a_kind_that_was_asked_for_in_two_numbers_has_one_curve(paths: PlanPaths) -> None:
    twice = plan_by_hand(devices=(H100, H100.model_copy(update={"nodes": 2})), best=0)
    page = render_plan(twice, {})
    assert page.count(">fewest: 4 x h100-80gb</text>") == 4  # two figures, each for a desk and for a phone


def test_the_step_is_drawn_at_the_arm_s_own_micro_batch(paths: PlanPaths) -> None:
    arm = H100.arms[0]
    assert arm.runs == ("z3-mbs1-of8", "z3-mbs2-of8")
    run = step_run(paths, H100)
    assert run.micro_batch == arm.micro_batch == 4
    assert step_line(run) == step_line(run_by_hand(4))


def test_if_the_runs_have_other_events_the_nearest_one_is_drawn_and_the_page_says_so(tmp_path: Path) -> None:
    paths = plan_folder(tmp_path)
    write_run(paths.run("z3-mbs2-of8"), run_by_hand(2, accumulation=2))
    run = step_run(paths, H100)
    assert run.micro_batch == 2
    line = step_line(run)
    assert line is not None
    drawn = line_figure(H100, line)
    assert "This is the step of micro-batch 2. That of 4 does not follow from it." in drawn.says
    assert drawn.figure is not None
    assert "the whole need" not in drawn.figure.words


_RUNS = ("z3-mbs1-of8",), ("z2-mbs1-of8", "z2-mbs2-of8")


def test_an_arm_that_ran_at_one_size_grows_as_another_arm_does(tmp_path: Path) -> None:
    paths = plan_folder(tmp_path)
    for size in (1, 2):
        write_run(paths.run(f"z2-mbs{size}-of8"), run_by_hand(size))
    z3, z2 = (arm.model_copy(update={"runs": names}) for arm, names in zip(H100.arms[:2], _RUNS, strict=True))
    run = step_run(paths, H100.model_copy(update={"arms": (z3, z2)}))
    assert run.micro_batch == 4
    assert step_line(run) == step_line(run_by_hand(4))
    # If no arm ran at two sizes, the program has batches of one size, whatever size was asked for.
    assert step_run(paths, H100.model_copy(update={"arms": (z3,)})).storages == run_by_hand(1).storages


def test_on_other_devices_the_states_are_divided_anew(paths: PlanPaths) -> None:
    here, wider = (step_line(step_run(paths, H100.model_copy(update={"nodes": nodes}))) for nodes in (1, 2))
    assert here is not None
    assert wider is not None
    of_here, of_wider = (dict(zip(line.kinds, line.bytes[0], strict=True)) for line in (here, wider))
    assert of_wider["optimizer"] == of_here["optimizer"] / 2


@pytest.mark.parametrize(
    ("value", "said"), [(18.666, "18.7"), (18.0, "18.0"), (38_265.0, "38,300"), (0.01234, "0.0123"), (999.6, "1,000")]
)
def test_a_speed_has_three_digits(value: float, said: str) -> None:
    assert figure_text(value) == said


@pytest.mark.parametrize(("share", "said"), [(1.0, "over 95 %"), (0.94, "94 %"), (0.0, "under 20 %")])
def test_nothing_is_called_surer_than_measurements_have_shown(share: float, said: str) -> None:
    assert likelihood(share) == said
