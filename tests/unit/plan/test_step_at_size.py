import pytest
from synthetic import EXACT, TWO, carried, moving, product, run_of

from zerotune.trial_lib.messages.foreseen_run import ForeseenRun
from zerotune.trial_lib.plan.scaling import at_size
from zerotune.trial_lib.plan.step_time import planned_step


def at(size: int, extra: int = 0) -> ForeseenRun:
    """A run with work in proportion to the size, work of the parameters alone, and now and then more operations."""
    pieces = [product(size / 4 / (1 + extra)) for _ in range(4 * (1 + extra))]
    return run_of(
        ("load", []),
        ("forward", [carried(0.5, "all_gather"), *pieces]),
        ("update", [moving(0.25, "update")]),
        micro_batch=size,
        stage=3,
        loading_s=(0.1 * size,),
    )


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_two_sizes_give_every_other(size: int) -> None:
    found, really = at_size(at(2), at(4), size), at(size)
    assert [each.flops for each in found.operations] == pytest.approx([each.flops for each in really.operations])
    assert [each.moved for each in found.operations] == pytest.approx([each.moved for each in really.operations])
    assert planned_step(found, TWO, EXACT).seconds == pytest.approx(planned_step(really, TWO, EXACT).seconds)
    assert found.micro_batch == size


def test_a_moment_with_other_operations_is_scaled_as_a_whole() -> None:
    found = at_size(at(2), at(4, extra=1), 3)
    assert planned_step(found, TWO, EXACT).seconds == pytest.approx(planned_step(at(3), TWO, EXACT).seconds, rel=1e-6)


def test_the_accumulation_may_be_another() -> None:
    once, thrice = (planned_step(at_size(at(2), at(4), 3, each), TWO, EXACT) for each in (1, 3))
    assert once.seconds < thrice.seconds < 3 * once.seconds
    assert thrice.samples_per_s > once.samples_per_s


def test_one_size_gives_no_line() -> None:
    with pytest.raises(ValueError, match="a micro-batch of 2"):
        at_size(at(2), at(2), 3)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_run_with_two_micro_batches_and_one_with_one_give_the_same_line(size: int) -> None:
    """A global batch that is kept has two micro-batches of half the size."""
    twice = run_of(
        *(
            moment
            for _ in range(2)
            for moment in (
                ("load", []),
                ("forward", [carried(0.5, "all_gather"), *(product(0.5) for _ in range(4))]),
                ("update", [moving(0.25, "update")]),
            )
        ),
        micro_batches=(0, 0, 0, 1, 1, 1),
        micro_batch=2,
        accumulation=2,
        stage=3,
        loading_s=(0.2,),
    )
    found = at_size(twice, at(4), size, 1)
    assert planned_step(found, TWO, EXACT).seconds == pytest.approx(planned_step(at(size), TWO, EXACT).seconds)
