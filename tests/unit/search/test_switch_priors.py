"""What arms with switches of the program are expected to cost, whatever names the switches."""

import pytest

from trial_lib.search.arm_priors import prior_costs
from trial_lib.space.knobs import Arm


def cost(**switches: object) -> float:
    return prior_costs([Arm({"zero_optimization": {"stage": 1}, "program": switches})])[0]


@pytest.mark.parametrize(
    ("of_trainer", "turned"),
    [
        ({"--gradient_checkpointing": True}, {"model:activation_checkpointing": "full"}),
        ({"--gradient_checkpointing": False}, {"model:activation_checkpointing": "none"}),
        ({"--attn_implementation": "eager"}, {"model:attention": "eager"}),
        ({"--torch_compile": True}, {"model:compile": True}),
    ],
)
def test_the_options_of_a_trainer_cost_what_the_switches_do_that_zerotune_turns(
    of_trainer: dict[str, object], turned: dict[str, object]
) -> None:
    assert cost(**of_trainer) == cost(**turned)


def test_compilation_is_expected_to_gain_and_recomputation_to_cost() -> None:
    plain = cost(**{"--unknown": True})
    assert cost(**{"model:compile": True}) < plain < cost(**{"model:activation_checkpointing": "every_second"})
    assert cost(**{"--gradient_checkpointing": True}) > cost(**{"model:activation_checkpointing": "every_second"})
