"""What is read off a command of its batch: the numbers that stand where a mapping says."""

from pathlib import Path

import pytest

from zerotune.trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH
from zerotune.trial_lib.inputs.places import BatchPlace, batch_places


@pytest.mark.parametrize(
    ("command", "target", "shown"),
    [
        ("--acc 2 --x", "--acc", "--acc 2"),
        ("--acc=2 --acc 3", "--acc", "--acc 3"),
        ("-a2", "-a", "-a2"),
        ("--grad-acc 3", "--grad_acc", "--grad-acc 3"),
        ("trainer.acc=2", "trainer.acc", "trainer.acc=2"),
        ("x y 2", "argv:3", "2"),
        ("--x", "ACC", "ACC=4"),
    ],
)
def test_a_mapped_number_is_shown_as_it_was_typed(command: str, target: str, shown: str) -> None:
    (place,) = batch_places(command.split(), {"ACC": "4"}, {ACCUMULATION: target}, Path())
    assert place == BatchPlace(ACCUMULATION, int(shown[-1]), shown)


@pytest.mark.parametrize(
    ("command", "target"),
    [
        ("--acc 2", "--accumulate"),
        ("--acc fast", "--acc"),
        ("--acc --x", "--acc"),
        ("-- --acc 2", "--acc"),
        ("trainer.acc=2,4", "trainer.acc"),
        ("trainer.acc=${acc}", "trainer.acc"),
        ("", "ACCUMULATE"),
    ],
)
def test_what_is_not_typed_or_no_number_says_nothing(command: str, target: str) -> None:
    assert batch_places(command.split(), {"ACC": "4"}, {MICRO_BATCH: target}, Path()) == []
