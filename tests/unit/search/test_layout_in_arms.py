"""Tensor parallelism among the arms of a space: on request, or if the user trains so."""

from dataclasses import replace

import pytest

from tests.unit.search.arms_of_space import adaptive, fine, here, labels, told
from zerotune.trial_lib.deepspeed_config.layout import AUTOTP, LAYOUTS, PROGRAM, ModelShape, Replicas
from zerotune.trial_lib.inputs.search_space import read_search_space
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.search.arms import RequestedKnob, layouts_not_tried

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
    space = adaptive(asked, at=here(shape=ModelShape((32, 4))), stages=STAGE_1)
    assert {label for label in labels(space) if "offload" not in label} == {"z1", "z1-tp2"}
    by_devices, by_heads = layouts_not_tried({AUTOTP: asked.values}, here(shape=ModelShape((32, 4))))
    assert by_devices == f"{AUTOTP} 3 is not tried: DeepSpeed cannot divide 8 devices into tensor-parallel groups of 3."
    assert "4 heads over 8 ranks" in by_heads


def test_the_stages_of_a_pipeline_are_not_divided() -> None:
    (said,) = told(RequestedKnob(AUTOTP, (2,)), at=here(replicas=4, pipeline=True))
    assert said == f"{AUTOTP} has no effect: AutoTP does not divide the stages of a pipeline."


def test_a_group_has_at_least_one_rank() -> None:
    with pytest.raises(InputError, match="a whole number from 1 on"):
        read_search_space({AUTOTP: [0, 2]})


STAGES = RequestedKnob("program.--stages", (1, 2, 4, 3), coarse=True, layout="pipeline")
BY_SWITCH = {PROGRAM: {"--stages": 1}, LAYOUTS: {"--stages": "pipeline"}, "optimizer": {"type": "AdamW"}}


def test_a_switch_that_is_a_layout_is_tried_at_the_sizes_that_divide_devices_and_layers() -> None:
    at = here(base=BY_SWITCH, shape=ModelShape(layer_count=3))
    space = adaptive(STAGES, at=at, stages=(1, 2))
    found = {label for label in labels(space) if "offload" not in label}
    # A pipeline does not go with stage 2.
    assert found == {"z1-stages=1", "z1-stages=2", "z2-stages=1"}
    by_layers, by_devices = layouts_not_tried({STAGES.path: STAGES.values}, at)
    assert by_layers == "--stages 4 is not tried: A pipeline cannot divide 3 layers over 4 stages."
    assert by_devices == "--stages 3 is not tried: DeepSpeed cannot divide 8 devices into 3 pipeline stages."


def test_two_layouts_that_do_not_divide_the_devices_together_are_no_arm() -> None:
    both = {PROGRAM: {"--stages": 1, "--tp": 1}, LAYOUTS: {"--stages": "pipeline", "--tp": "tensor"}}
    requests = [replace(STAGES, values=(1, 4)), RequestedKnob("program.--tp", (1, 4), coarse=True, layout="tensor")]
    space = adaptive(*requests, at=here(base={**both, "optimizer": {"type": "AdamW"}}), stages=STAGE_1)
    found = {label for label in labels(space) if "offload" not in label}
    assert found == {"z1-stages=1-tp=1", "z1-stages=4-tp=1", "z1-stages=1-tp=4"}


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({"values": [1, 2], "layout": "depth"}, "'depth' is no layout"),
        ({"values": [1, "two"], "layout": "tensor"}, "a layout is a number of ranks"),
        ({"values": [0, 2], "layout": "tensor"}, "a layout is a number of ranks"),
        ({"values": [1, 2], "layout": "tensor", "coarse": False}, "decides memory"),
    ],
)
def test_a_layout_that_cannot_be_one_is_refused(said: dict[str, object], error: str) -> None:
    with pytest.raises(InputError, match=error):
        read_search_space({PROGRAM: {"--size": said}})


def test_a_layout_is_coarse_also_as_a_variable_and_each_kind_has_one_switch() -> None:
    said = {"values": [1, 2], "layout": "sequence"}
    (request,) = read_search_space({PROGRAM: {"PARALLELISM_CONFIG_SP_SIZE": said}})
    assert (request.layout, request.is_coarse) == ("sequence", True)
    with pytest.raises(InputError, match="are both the sequence layout"):
        read_search_space({PROGRAM: {"--sp": said, "SP": said}})


def test_the_variable_of_a_trainers_ulysses_is_a_layout_without_a_word_and_keeps_the_global_batch() -> None:
    place = "PARALLELISM_CONFIG_SP_SIZE"
    for said in ([1, 2], {"values": [1, 2]}, {"min": 1, "max": 2, "count": 2}):
        (request,) = read_search_space({PROGRAM: {place: said}})
        assert (request.layout, request.is_coarse, request.values) == ("sequence", True, (1, 2))
    base = {PROGRAM: {place: 1}, LAYOUTS: {place: "sequence"}}
    replicas = Replicas(slots=8, own=8, base_config=base)
    assert [replicas.of({PROGRAM: {place: size}}) for size in (1, 2, 4)] == [8, 4, 2]
