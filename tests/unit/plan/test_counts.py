"""The curve over numbers of devices agrees with the table of the asked number."""

from zerotune.trial_lib.plan.evaluation import fewest, with_answer
from zerotune.trial_lib.plan.plan_record import PlannedArm, PlannedCount, PlannedRange

CURVE = (PlannedCount(devices=8, label="z3", micro_batch=1), PlannedCount(devices=16, label="z2", micro_batch=2))
PEAK = PlannedRange(value=9.0, low=8.0, high=10.0)


def test_where_the_table_fits_nothing_the_curve_does_not_either() -> None:
    counts = with_answer(CURVE, 8, None, PlannedArm(label="z3", peak=PEAK))
    assert counts == (PlannedCount(devices=8, peak=PEAK), CURVE[1])
    assert fewest(counts) == 16


def test_an_answer_with_another_batch_stays() -> None:
    other = (CURVE[0].model_copy(update={"other_batch": 64}), CURVE[1])
    assert with_answer(other, 8, None, PlannedArm(label="z3", peak=PEAK)) == other


def test_the_answer_of_the_table_is_that_of_the_curve() -> None:
    arm = PlannedArm(label="z1", micro_batch=4, fits=0.9, peak=PEAK)
    (asked, _) = with_answer(CURVE, 8, arm, arm)
    assert (asked.label, asked.micro_batch, asked.fits, asked.peak) == ("z1", 4, 0.9, PEAK)
