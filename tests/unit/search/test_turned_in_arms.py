"""Switches that ZeroTune turns in a search space: a program has the values that its profile trial found."""

from arms_of_space import here, labels

from zerotune.trial_lib.messages.turned import ATTENTION as PLACE
from zerotune.trial_lib.messages.turned import TURNED, WORKERS
from zerotune.trial_lib.search.arms import RequestedKnob, build_space, values_not_tried, without_effect
from zerotune.trial_lib.study.training_command import lines_to_write

ATTENTION = RequestedKnob("program.model:attention", ("eager", "sdpa", "flash_attention_2"), coarse=True)
COMPILE = RequestedKnob("program.model:compile", (False, True), coarse=True)
BASE = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 1}, "program": {"model:attention": "sdpa"}}


def test_only_what_the_program_can_have_is_tried_and_the_rest_is_told_with_its_reason() -> None:
    found = here(
        "cpu",
        base=BASE,
        turnable={"model:attention": ["sdpa", "eager"]},
        not_turnable={"model:compile": "torch.compile needs a C++ compiler such as g++"},
    )
    requests = (ATTENTION, COMPILE)
    space = build_space((1,), found, requests, catalogue=True)
    assert sorted(labels(space)) == ["z1-attention=eager", "z1-attention=sdpa"]
    assert without_effect((1,), found, requests, catalogue=True) == [
        "model:compile has no effect: torch.compile needs a C++ compiler such as g++."
    ]


def test_a_requested_value_that_the_program_cannot_have_is_told() -> None:
    found = here("cpu", base=BASE, turnable={WORKERS: [0, 1, 2], PLACE: ["sdpa", "eager"]})
    workers = RequestedKnob(f"program.{WORKERS}", (None, 2, 8), coarse=False)
    assert values_not_tried([workers], found) == ["loader:num_workers=8 is not tried: your program can have 0, 1, 2."]
    without_values = RequestedKnob(f"program.{PLACE}", TURNED[PLACE].values, coarse=True)
    with_effect = RequestedKnob(f"program.{WORKERS}", (1, 2), coarse=False)
    without_any = RequestedKnob(f"program.{WORKERS}", (8, 16), coarse=False)
    assert values_not_tried([without_values, with_effect, without_any], found) == []
    # None stands for the value as typed, also of a switch with a place in the command.
    assert values_not_tried([RequestedKnob("program.OWN", (None, "b"), coarse=False)], found) == []


def test_before_the_profile_trial_no_arm_has_such_a_switch() -> None:
    assert labels(build_space((1,), here("cpu", base=BASE), (COMPILE,), catalogue=True)) == ["z1"]


def test_the_answer_names_what_differs_from_the_program() -> None:
    (line,) = lines_to_write({"model:compile": True, "model:attention": "sdpa"}, {"model:attention": "sdpa"})
    assert "engine.compile()" in line


def test_deepcompile_also_acts_in_arms_that_zerotune_compiles() -> None:
    found = here("cuda", base=BASE, turnable={"model:compile": [False, True]})
    deepcompile = RequestedKnob("compile.deepcompile", (True, False))
    found_labels = labels(build_space((1,), found, (COMPILE, deepcompile), catalogue=True))
    assert "z1-compile-deepcompile" in found_labels or "z1-deepcompile-compile" in found_labels
    assert "z1-deepcompile" not in found_labels
