"""Numbers that code asks of fake tensors: known askers, defaults, and the record."""

import pytest
import torch

from zerotune.trial_lib.plan.simulate.asks import Asks, known


def test_an_unknown_asker_is_recorded_with_its_place_and_its_answer():
    asks = Asks()

    def asks_for_a_loss():
        return asks.answer("item", torch.float32)

    assert asks_for_a_loss() == 1.0
    assert asks_for_a_loss() == 1.0
    (ask,) = asks.record()
    # The frame of this test's helper is torch's caller in a real run, and one frame is left out here.
    assert "test_asks.py" in ask.asker
    assert (ask.question, ask.answer, ask.is_known) == ("item", "1.0", False)
    assert ask.count >= 1


@pytest.mark.parametrize(
    ("question", "dtype", "answer"),
    [
        ("item", torch.float16, 1.0),
        ("item", torch.int64, 0),
        ("item", torch.bool, False),
        ("equal", torch.bool, True),
    ],
)
def test_defaults_are_those_of_a_healthy_training(question, dtype, answer):
    given = Asks().answer(question, dtype)
    assert given == answer
    assert type(given) is type(answer)


def test_deepspeeds_overflow_checks_are_known():
    row = known("/x/site-packages/deepspeed/runtime/zero/stage_1_and_2.py", "has_overflow")
    assert row is not None
    assert row.answer is False
    assert known("/home/me/stage_1_and_2.py", "has_overflow") is None
