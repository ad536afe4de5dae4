"""Hours and price of the whole training: its length, the cheapest devices in time, and what is not told apart."""

from pathlib import Path
from typing import Any

import pytest

from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.foreseen_run import ForeseenRun
from zerotune.trial_lib.plan.answer import best_of
from zerotune.trial_lib.plan.devices import known_devices, read_devices, read_price_file
from zerotune.trial_lib.plan.plan_record import (
    PlannedArm,
    PlannedCount,
    PlannedDevices,
    PlannedRange,
    PlannedTraining,
    TrainingRow,
    read_length,
)
from zerotune.trial_lib.plan.whole_training import largest_that_fit, length_of, whole_training

TYPED = ForeseenRun(
    world=8,
    replicas=8,
    micro_batch=4,
    accumulation=2,
    tokens=512,
    parameters=1_000,
    program={"samples_per_epoch": 4_500, "whole_epochs": 3.0},
)
SAMPLES = 3 * 36_000


def _speed(value: float) -> PlannedRange:
    return PlannedRange(value=value, low=value / 2, high=2 * value)


def _devices(
    name: str, price: float | None, speeds: dict[int, float], asked: int = 8, apart: float = 1.2, **arm: Any
) -> PlannedDevices:
    """Devices whose one arm has these samples/s, by their number."""
    chosen = PlannedArm(label="z2", fits=0.97, largest_micro_batch=4, samples_per_s=_speed(speeds[asked]), **arm)
    counts = tuple(
        PlannedCount(devices=count, label="z2", micro_batch=4, fits=0.97, samples_per_s=_speed(speed), apart=apart)
        for count, speed in speeds.items()
    )
    return PlannedDevices(
        device=name,
        nodes=1,
        per_node=asked,
        figures={"per_host": 8},
        price=price,
        arms=(chosen,),
        best="z2",
        counts=counts,
        fewest=min(speeds),
    )


def _whole(*devices: PlannedDevices, within: float | None = None, whole: str | None = None) -> PlannedTraining:
    length = read_length(whole) if whole else length_of(TYPED.program)
    found = whole_training(devices, {}, TYPED, length, within)
    assert found is not None
    return found


def _row(whole: PlannedTraining, devices: str) -> TrainingRow:
    return next(row for row in whole.rows if row.devices == devices)


@pytest.mark.parametrize(
    ("text", "samples"),
    [
        ("3epochs", SAMPLES),
        ("1 epoch", 36_000),
        ("500_000 samples", 500_000),
        ("2e6tokens", 2e6 / 512),
        ("1.5B tokens", 1.5e9 / 512),
        ("1k steps", 64_000),
    ],
)
def test_a_length_is_samples_of_all_devices(text: str, samples: float) -> None:
    length = read_length(text)
    assert length.samples(TYPED, batch=64) == pytest.approx(samples)


@pytest.mark.parametrize("text", ["", "3", "epochs", "-1epochs", "0steps", "3 fortnights", "nan tokens"])
def test_what_is_no_length_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ValueError, match="is no length of a training: write --whole 3epochs"):
        read_length(text)


def test_the_trainer_tells_the_length_and_its_steps_come_first() -> None:
    assert str(length_of({"whole_epochs": 3.0})) == "3 epochs"
    assert str(length_of({"whole_epochs": 3.0, "whole_steps": 500})) == "500 steps"
    assert length_of({}) is None


def test_hours_and_price_have_the_interval_of_the_speed() -> None:
    whole = _whole(_devices("h100-80gb", 3.0, {8: 10.0}))
    row = _row(whole, "h100-80gb:8")
    assert row.hours == PlannedRange(value=3.0, low=1.5, high=6.0)
    assert row.price == PlannedRange(value=72.0, low=36.0, high=144.0)


def test_the_cheapest_in_time_is_named_and_not_one_that_is_late() -> None:
    slow = _devices("l40s-48gb", 0.5, {1: 1.0, 8: 6.0})
    fast = _devices("h100-80gb", 3.0, {1: 4.0, 8: 30.0})
    whole = _whole(slow, fast, within=8)
    assert _row(whole, "l40s-48gb:1").price.value < _row(whole, "l40s-48gb:8").price.value  # type: ignore[union-attr]
    assert [row.devices for row in whole.rows if row.is_best] == ["l40s-48gb:8"]
    assert "The cheapest devices on which it ends within 8 h: l40s-48gb:8" in whole.answer
    # Its interval reaches ten hours.
    assert "Within its whole interval h100-80gb:8 does" in whole.answer
    assert whole.in_time == {"l40s-48gb:8", "h100-80gb:1", "h100-80gb:8"}


def test_without_prices_it_is_the_fewest_devices_in_time() -> None:
    whole = _whole(_devices("h100-80gb", None, {1: 2.0, 2: 4.0, 4: 8.0, 8: 16.0}), within=8)
    assert whole.answer.startswith("The fewest devices on which it ends within 8 h: h100-80gb:2")
    assert "plan with --on h100-80gb:2" in whole.answer


def test_two_prices_that_are_not_told_apart_are_both_named() -> None:
    one = _devices("h100-80gb", 3.0, {8: 30.0})
    near, far = _devices("a100-80gb", 1.2, {8: 10.0}), _devices("l40s-48gb", 3.0, {8: 10.0})
    answer = _whole(one, near, far).answer
    assert "In price it is not told apart from a100-80gb:8" in answer
    assert "l40s" not in answer
    assert "not told apart" not in _whole(one, near.model_copy(update={"price": 6.0})).answer


def test_the_plan_answers_with_devices_on_which_it_ends_in_time() -> None:
    cheap = _devices("l40s-48gb", 0.1, {8: 1.0}, cost=_speed(5.0))
    fast = _devices("h100-80gb", 3.0, {8: 30.0}, cost=_speed(9.0))
    assert best_of([cheap, fast]) == 0
    assert best_of([cheap, fast], _whole(cheap, fast, within=4).in_time) == 1


def test_nothing_in_time_is_said() -> None:
    assert _whole(_devices("h100-80gb", 3.0, {8: 1.0}), within=1).answer == "Nothing foreseen here ends within 1 h."


def test_a_program_that_tells_no_length_is_asked_for_one_only_if_it_matters() -> None:
    endless = ForeseenRun(world=8, replicas=8, program={"samples_per_epoch": 100})
    devices = _devices("h100-80gb", 3.0, {8: 1.0})
    found = whole_training([devices], {}, endless, None, None)
    assert found is not None
    assert "An epoch of its data has 800 samples. Give --whole 3epochs" in found.missing
    assert whole_training([devices.model_copy(update={"price": None})], {}, endless, None, None) is None
    unknown = whole_training([devices], {}, ForeseenRun(world=8), read_length("2epochs"), None)
    assert unknown is not None
    assert "its data loader has no length" in unknown.missing


def test_each_setting_of_a_switch_has_hours_of_its_own() -> None:
    """LoRA beside full, or a longer sequence: the samples of its own run count."""
    devices = _devices("h100-80gb", 3.0, {8: 10.0})
    other = PlannedArm(
        label="z2-length=1024",
        switches={"length=1024": "--length 1024"},
        fits=0.9,
        largest_micro_batch=2,
        samples_per_s=_speed(5.0),
        runs=("long",),
    )
    devices = devices.model_copy(update={"arms": (*devices.arms, other)})
    long = ForeseenRun(world=8, replicas=8, tokens=1024, program={"samples_per_epoch": 2_250})
    found = whole_training([devices], {"long": long}, TYPED, length_of(TYPED.program), None)
    assert found is not None
    assert {row.label: (row.hours.value, row.marks) for row in found.rows} == {
        "z2": (3.0, ("asked", "fewest", "cheapest")),
        # It is another training, so it is in no contest for the cheapest.
        "z2-length=1024": (3.0, ("asked", "other training")),
    }


def test_two_numbers_of_one_kind_share_their_rows() -> None:
    few, many = (_devices("h100-80gb", 3.0, {4: 5.0, 8: 10.0}, asked=asked) for asked in (4, 8))
    rows = _whole(few, many).rows
    assert {row.devices: row.marks for row in rows} == {
        "h100-80gb:4": ("asked", "fewest", "cheapest"),
        "h100-80gb:8": ("asked",),
    }


def _arm(value: object, is_fitting: bool, run: str = "") -> PlannedArm:
    return PlannedArm(
        label=f"z2-{value}",
        knobs={"program": {"--size": value}},
        largest_micro_batch=int(is_fitting),
        runs=(run,) if run else (),
    )


def test_the_longest_sequence_and_the_largest_model_that_fit_are_named() -> None:
    def said(*arms: PlannedArm, **parameters: int) -> tuple[str, ...]:
        runs = {name: ForeseenRun(world=1, parameters=count) for name, count in parameters.items()}
        return largest_that_fit(PlannedDevices(device="h100-80gb", nodes=1, per_node=8, arms=arms), runs)

    def of_tokens(value: int, is_fitting: bool) -> PlannedArm:
        return _arm(value, is_fitting, f"length{value}")

    longer = (of_tokens(512, True), of_tokens(4096, True), of_tokens(8192, False))
    assert said(*longer, length512=1, length4096=4, length8192=8) == (
        "The largest that fits, of 3 that were foreseen: --size=4096.",
    )
    none = (of_tokens(512, False), of_tokens(4096, False))
    assert said(*none, length512=1, length4096=4) == ("None of the 2 values of --size fits.",)
    # Neither model nor samples follow that number.
    assert said(*longer, length512=4, length4096=4, length8192=4) == ()
    small, large = _arm("tiny", True, "small"), _arm("huge", False, "large")
    assert said(small, large, small=10, large=4_000) == (
        "The largest that fits, of 2 that were foreseen: --size=tiny (10 parameters).",
    )
    # Names that do not differ in size have no largest, and a boolean has none either.
    assert said(small, large, small=10, large=10) == ()
    assert said(_arm(True, True), _arm(False, True)) == ()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("prices.yaml", "# of my provider\nh100-80gb: 2.99\nl40s: 0.89\n"),
        ("prices.csv", "device,price per hour\nh100-80gb,2.99\n\nL40S,0.89\n"),
        ("prices.csv", "h100-80gb,2.99\nl40s, 0.89"),
    ],
)
def test_a_list_of_prices_is_yaml_or_csv_with_short_names(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert read_price_file(file, known_devices()) == {"h100-80gb": 2.99, "l40s-48gb": 0.89}


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("prices.yaml", "h100-80gb: cheap", '"cheap" is no price of "h100-80gb".'),
        ("prices.yaml", "h100-80gb: -1", '"-1" is no price'),
        ("prices.yaml", "a100: 2", "may be a100-80gb"),
        ("prices.yaml", "l40s: 1\nl40s-48gb: 2", "l40s-48gb has two prices"),
        ("prices.yaml", "- h100", "it has no prices"),
        ("prices.yaml", "h100: [", "it has no prices"),
        ("prices.yaml", "", "it has no prices"),
        ("prices.csv", "device,price\n", "it has no prices"),
        ("prices.csv", "h100-80gb,2.99\nl40s\n", '"" is no price of "l40s".'),
        ("prices.csv", "h100-80gb,2,99\n", '"2,99" is no price'),
    ],
)
def test_a_bad_list_of_prices_gets_one_sentence(tmp_path: Path, name: str, text: str, problem: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(InputError) as refused:
        read_price_file(file, known_devices())
    assert problem in str(refused.value)
    assert str(file) in str(refused.value)


def test_a_missing_list_of_prices_is_named() -> None:
    with pytest.raises(InputError, match="No such file"):
        read_price_file(Path("/nowhere/prices.yaml"), known_devices())


def test_a_list_may_have_more_devices_than_are_asked_for() -> None:
    known = known_devices()
    listed = {"h100-80gb": 3.0, "l40s-48gb": 0.9}
    own, other = read_devices(["h100-80gb:8", "t4:4"], ["h100-80gb=2.5"], known, listed)
    assert (own.price, other.price) == (2.5, None)
