"""What arms with switches of the program are expected to cost, whatever names the switches."""

import pytest

from zerotune.trial_lib.messages.turned import FUSED, WORKERS
from zerotune.trial_lib.records.switches import path_of
from zerotune.trial_lib.search.cost_model import SpaceCoordinates, fine_cost, prior_costs
from zerotune.trial_lib.search.knobs import Arm, Knob, SearchSpace


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


def test_fine_switches_of_one_direction_cost_more_at_their_wrong_end() -> None:
    costs = [fine_cost(path_of(WORKERS), workers, (4, 1, 0), "cuda") for workers in (4, 1, 0)]
    assert costs == sorted(costs)
    assert costs[0] == 0.0 < costs[1]
    written, fused = (fine_cost(path_of(FUSED), form, (True, False), "cuda") for form in (False, True))
    assert written > fused == 0.0
    # What the program has by itself, the only value there is, and a switch that is not known.
    assert fine_cost(path_of(WORKERS), None, (None, 4), "cuda") == 0.0
    assert fine_cost(path_of(WORKERS), 0, (0,), "cuda") == 0.0
    assert fine_cost(path_of("OMP_NUM_THREADS"), 1, (4, 1), "cuda") == 0.0


@pytest.mark.parametrize("workers", [(4, 1, 0), (4, None)])
def test_a_search_expects_the_cost_of_every_fine_switch_of_a_family(workers: tuple[int | None, ...]) -> None:
    fine = (Knob(path_of(FUSED), (True, False)), Knob(path_of(WORKERS), workers))
    coordinates = SpaceCoordinates(SearchSpace.of_arms([Arm({"zero_optimization": {"stage": 1}}, fine)]))
    families = [(0, index) for index in range(2 * len(workers))]
    costs = coordinates.fine_costs(families)
    assert costs[0] == 0.0
    assert costs[1] == fine_cost(path_of(FUSED), False, (True, False), "cuda")
    assert costs[-1] == costs[1] + fine_cost(path_of(WORKERS), workers[-1], workers, "cuda")
    assert coordinates.fine(families).shape == (len(families), 2)


def test_on_a_cpu_neither_form_of_adam_is_expected_to_be_the_faster() -> None:
    space = SearchSpace.of_arms([Arm({"zero_optimization": {"stage": 1}}, (Knob(path_of(FUSED), (True, False)),))])
    cpu, gpu = (SpaceCoordinates(space, device) for device in ("cpu", "cuda"))
    fused, written = families = [(0, 0), (0, 1)]
    assert cpu.fine_costs(families).tolist() == [0.0, 0.0]
    assert gpu.fine_costs([written])[0] > gpu.fine_costs([fused])[0]
    # So the search has to expect surprises of the other form.
    near, far = (abs(float(each.fine([fused])[0, 0] - each.fine([written])[0, 0])) for each in (gpu, cpu))
    assert near < 1 < far
