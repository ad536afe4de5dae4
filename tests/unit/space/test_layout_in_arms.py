"""Tensor parallelism among the arms of a space: on request, or if the user trains so."""

import pytest

from tests.unit.space.arms_of_space import adaptive, fine, here, labels, told
from trial_lib.deepspeed_config.layout import AUTOTP
from trial_lib.experiment.search_space_section import read_search_space
from trial_lib.space.arms import RequestedKnob
from trial_lib.space.known_knobs.layout import layouts_not_tried
from trial_lib.wire.errors import InputError

TENSOR_4 = {"optimizer": {"type": "AdamW"}, "tensor_parallel": {"autotp_size": 4}}
STAGE_1 = (1,)


def test_nobody_gets_another_layout_without_asking_for_it() -> None:
    assert not any("tp" in label for label in labels(adaptive()))


def test_requested_groups_are_arms_of_their_own() -> None:
    space = adaptive(RequestedKnob(AUTOTP, (1, 2)), stages=STAGE_1)
    assert {label for label in labels(space) if "offload" not in label} == {"z1", "z1-tp2"}


def test_a_user_who_trains_so_gets_smaller_groups_as_well() -> None:
    space = adaptive(at=here(base=TENSOR_4, replicas=2), stages=STAGE_1)
    assert {label for label in labels(space) if "offload" not in label} == {"z1-tp1", "z1-tp2", "z1-tp4"}


def test_one_replica_has_no_knobs_of_communication_among_replicas() -> None:
    space = adaptive(RequestedKnob(AUTOTP, (1, 8)), stages=(3,))
    assert "reduce_scatter" in fine(space, "z3")
    assert "reduce_scatter" not in fine(space, "z3-tp8")


def test_groups_that_divide_neither_devices_nor_heads_are_not_tried() -> None:
    asked = RequestedKnob(AUTOTP, (1, 2, 3, 8))
    space = adaptive(asked, at=here(head_counts=(32, 4)), stages=STAGE_1)
    assert {label for label in labels(space) if "offload" not in label} == {"z1", "z1-tp2"}
    by_devices, by_heads = layouts_not_tried(asked.values, here(head_counts=(32, 4)))
    assert by_devices == f"{AUTOTP} 3 is not tried: DeepSpeed cannot divide 8 devices into tensor-parallel groups of 3."
    assert "4 heads over 8 ranks" in by_heads


def test_the_stages_of_a_pipeline_are_not_divided() -> None:
    (said,) = told(RequestedKnob(AUTOTP, (2,)), at=here(replicas=4, pipeline=True))
    assert said == f"{AUTOTP} has no effect: AutoTP does not divide the stages of a pipeline."


def test_a_group_has_at_least_one_rank() -> None:
    with pytest.raises(InputError, match="a whole number from 1 on"):
        read_search_space({AUTOTP: [0, 2]})
