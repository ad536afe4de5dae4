"""Which arms a space has, and which knobs vary within each."""

import random
from typing import Any

import pytest
from arms_of_space import LARGE, ZERO, adaptive, arm, fine, here, labels, told

from zerotune.trial_lib.search.arms import RequestedKnob, build_space
from zerotune.trial_lib.search.catalogue import KNOBS, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM
from zerotune.trial_lib.search.effects import Surroundings
from zerotune.trial_lib.search.knobs import STAGE, Arm, Knob, SearchSpace, get_knob, leaves


def test_on_an_accelerator_stages_are_tried_with_and_without_offload() -> None:
    assert labels(adaptive()) == [
        *("z0", "z1", "z1-offload-optimizer", "z2", "z2-offload-optimizer"),
        *("z3", "z3-offload-param", "z3-offload-optimizer", "z3-offload-optimizer-offload-param"),
    ]


def test_on_a_cpu_nothing_is_offloaded_and_nothing_overlaps() -> None:
    space = adaptive(at=here("cpu"))
    assert labels(space) == ["z0", "z1", "z2", "z3"]
    assert not any("overlap" in path or "pin" in path for label in labels(space) for path in fine(space, label))


def test_nvme_is_tried_where_the_configuration_names_a_path() -> None:
    base = {ZERO: {"stage": 3, "offload_param": {"device": "cpu", "nvme_path": "/nvme"}}}
    space = adaptive(at=here(base=base), stages=(2, 3))
    assert "z3-offload-optimizer-nvme" in labels(space)
    assert "z2-offload-optimizer-nvme" not in labels(space), "below stage 3 DeepSpeed offloads to the CPU instead"
    knobs = arm(space, "z3-offload-optimizer-nvme").knobs
    assert knobs[ZERO]["offload_optimizer"] == {"device": "nvme", "nvme_path": "/nvme"}


def test_each_section_keeps_the_path_that_it_names() -> None:
    sections = {f"offload_{name}": {"device": "nvme", "nvme_path": f"/{name}"} for name in ("optimizer", "param")}
    knobs = arm(
        adaptive(at=here(base={ZERO: {"stage": 3, **sections}})), "z3-offload-optimizer-nvme-offload-param-nvme"
    ).knobs
    assert {name: knobs[ZERO][name]["nvme_path"] for name in sections} == {
        "offload_optimizer": "/optimizer",
        "offload_param": "/param",
    }


def test_stage_3_keeps_nothing_gathered_where_its_parameters_are_on_nvme() -> None:
    limits = ["stage3_max_live_parameters", "stage3_max_reuse_distance"]
    on_cpu = {ZERO: {"stage": 3, "offload_param": {"device": "cpu", "nvme_path": "/nvme"}}}
    space = adaptive(at=here(base=on_cpu), stages=(3,))
    assert [arm(space, "z3-offload-param-nvme").knobs[ZERO][limit] for limit in limits] == [0, 0]
    assert not set(limits) & fine(space, "z3-offload-param-nvme").keys()
    assert limits[0] in fine(space, "z3-offload-optimizer")
    # The user's own may work because the host has room for all of them.
    on_nvme = {ZERO: {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}}}
    own = arm(adaptive(at=here(base=on_nvme), stages=(3,)), "z3-offload-param-nvme")
    assert not set(limits) & own.knobs[ZERO].keys()


def test_the_users_own_offload_on_a_cpu_is_compared_with_none() -> None:
    base = {ZERO: {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "optimizer": {"type": "AdamW"}}
    space = adaptive(at=here("cpu", base=base), stages=(0, 2))
    assert labels(space) == ["z0", "z2", "z2-offload-optimizer"]
    assert arm(space, "z0").knobs == {ZERO: {"stage": 0, "offload_optimizer": None}}


def test_what_the_configuration_says_already_is_left_out_of_an_arm() -> None:
    assert arm(adaptive(), "z2").knobs == {ZERO: {"stage": 2}}


def test_each_stage_varies_what_it_reads() -> None:
    def read_at(stage: int) -> set[str]:
        acting = {
            path: [each for each in known.effects if not each.lacks({STAGE: stage}, here(), default_of)[1]]
            for path, known in KNOBS.items()
            if not known.is_coarse
        }
        return {path.removeprefix(f"{ZERO}.") for path, effects in acting.items() if effects and effects[0].candidates}

    def default_of(path: str) -> Any:
        return KNOBS[path].default if path in KNOBS else None

    space = adaptive()
    varied = {stage: fine(space, f"z{stage}").keys() for stage in range(4)}
    assert varied == {stage: read_at(stage) for stage in range(4)}
    assert varied[0] == set()
    assert "overlap_comm" in varied[1] == varied[2] < varied[3]


def test_offload_brings_its_own_knobs_and_takes_away_what_it_decides() -> None:
    space = adaptive()
    of_z2 = fine(space, "z2-offload-optimizer").keys()
    assert of_z2 - fine(space, "z2").keys() == {"offload_optimizer.pin_memory", "round_robin_gradients"}
    assert fine(space, "z2").keys() - of_z2 == {"contiguous_gradients"}, "offload turns it on"
    both = fine(space, "z3-offload-optimizer-offload-param")
    assert {"offload_optimizer.pin_memory", "offload_param.pin_memory"} <= both.keys()


def test_a_single_replica_has_nothing_to_communicate() -> None:
    space = adaptive(at=here(slots=1, replicas=1))
    assert fine(space, "z2").keys() == {"reduce_bucket_size", "contiguous_gradients"}


def test_a_pipeline_is_tried_at_stages_0_and_1_without_overlap() -> None:
    space = adaptive(at=here(pipeline=True))
    assert {arm.stage for arm in space.arms} == {0, 1}
    assert "overlap_comm" not in fine(space, "z1")
    assert {arm.stage for arm in adaptive(at=here(pipeline=True), stages=(2, 3)).arms} == {2, 3}


def test_sizes_are_no_larger_than_the_model() -> None:
    space = adaptive(at=here(num_params=400_000))
    assert fine(space, "z2")["reduce_bucket_size"] == (400_000,)
    of_3 = fine(space, "z3")
    assert of_3["stage3_prefetch_bucket_size"] == (400_000, 0)
    assert all(value <= 800_000 for values in of_3.values() for value in values)


def test_the_best_guess_is_deepspeeds_default_or_the_users_own() -> None:
    base = {ZERO: {"stage": 3, "reduce_bucket_size": 123_456, "overlap_comm": False, "sub_group_size": "auto"}}
    theirs, own = adaptive(), adaptive(at=here(base=base))
    assert (fine(theirs, "z2")["overlap_comm"], fine(theirs, "z3")["overlap_comm"]) == ((False, True), (True, False))
    assert fine(theirs, "z3")["reduce_bucket_size"][0] == 500_000_000
    assert fine(own, "z3")["overlap_comm"] == (False, True)
    assert fine(own, "z3")["reduce_bucket_size"][:2] == (123_456, 500_000_000)
    assert fine(own, "z3")["sub_group_size"][0] == 1_000_000_000
    assert own.arms[-1].family(0)[ZERO]["reduce_bucket_size"] == 123_456


def test_on_a_cpu_gradients_are_best_not_copied_unless_the_user_says_so() -> None:
    def first(device: str, base: dict[str, Any]) -> dict[str, Any]:
        space = adaptive(at=here(device=device, base=base))
        return {label: fine(space, label)["contiguous_gradients"][0] for label in ("z1", "z2")}

    copied, left = {"z1": True, "z2": True}, {"z1": False, "z2": False}
    assert first("cuda", {}) == copied
    assert first("cpu", {}) == left
    assert first("cpu", {ZERO: {"contiguous_gradients": True}}) == copied


def test_a_knob_goes_by_the_name_that_the_configuration_uses() -> None:
    # DeepSpeed refuses a setting that stands there by both of its names.
    space = adaptive(at=here(base={ZERO: {"stage": 3, "prefetch_bucket_size": 5000}}))
    assert fine(space, "z3")["prefetch_bucket_size"][0] == 5000
    assert "stage3_prefetch_bucket_size" not in fine(space, "z3")
    request = RequestedKnob(f"{ZERO}.stage3_prefetch_bucket_size", (7,))
    space = adaptive(request, at=here(base={ZERO: {"prefetch_bucket_size": 5000}}))
    assert fine(space, "z3")["prefetch_bucket_size"] == (7,)


def test_checkpointing_activations_is_tried_where_the_code_asks_the_configuration() -> None:
    path = "activation_checkpointing.cpu_checkpointing"
    assert not any("checkpointing" in label for label in labels(adaptive()))
    assert "z2-cpu-checkpointing" in labels(adaptive(at=here(reads_activation_checkpointing=True)))
    assert "z2-partition-activations" not in labels(adaptive(at=here(reads_activation_checkpointing=True)))
    spread = adaptive(at=here(replicas=2, reads_activation_checkpointing=True))
    assert "z2-partition-activations" in labels(spread)
    assert told(RequestedKnob(path, (True,))) == [
        f"{path} has no effect: your code does not configure activation checkpointing by the DeepSpeed configuration."
    ]


def test_settings_of_tensor_parallel_groups_act_where_there_are_groups() -> None:
    path = "tensor_parallel.tp_overlap_comm"
    alone, grouped = here(), here(base={"tensor_parallel": {"autotp_size": 2}})
    request = RequestedKnob(path, (False, True))
    assert told(request, at=alone) == [f"{path} has no effect: it takes tensor_parallel.autotp_size not to be 0 or 1."]
    assert told(request, at=grouped) == []
    both = adaptive(request, RequestedKnob("tensor_parallel.autotp_size", (1, 2)), stages=(1,))
    varying = {arm.label for arm in both.arms if any(knob.path == path for knob in arm.fine)}
    assert varying == {"z1-tp2", "z1-offload-optimizer-tp2"}
    assert path not in {knob.path for arm in adaptive(at=grouped).arms for knob in arm.fine}


def test_experts_under_autoep_are_shared_by_groups_that_divide_the_ranks() -> None:
    path = "expert_parallel.autoep_size"
    request = RequestedKnob(path, (1, 2, 3))
    assert told(request)[0] == f"{path} has no effect: it takes expert_parallel.enabled to be true."
    space = adaptive(request, at=here(base={"expert_parallel": {"enabled": True}}), stages=(1,))
    sizes = {get_knob(arm.knobs, path, 1) for arm in space.arms}
    assert sizes == {1, 2}, "3 does not divide the devices"


# The catalogue's knobs by which losses may differ by more than rounding.
MATHEMATICS = (
    *(f"{ZERO}.zero_quantized_{name}" for name in ("weights", "nontrainable_weights", "gradients")),
    *("bf16.enabled", "torch_autocast.enabled", "communication_data_type"),
)


def test_what_changes_the_mathematics_is_varied_on_request_only() -> None:
    space = adaptive()
    assert not any(path in MATHEMATICS for arm in space.arms for path, _ in leaves(arm.family(0)))
    space = adaptive(RequestedKnob("bf16.enabled", (False, True)), stages=(2,))
    assert set(labels(space)) == {"z2", "z2-bf16", "z2-offload-optimizer", "z2-offload-optimizer-bf16"}
    changed = [(path, value) for path, value in leaves(arm(space, "z2-bf16").knobs) if path in MATHEMATICS]
    assert changed == [("bf16.enabled", True)]


def test_a_request_takes_the_place_of_a_knobs_values() -> None:
    space = adaptive(
        RequestedKnob(f"{ZERO}.overlap_comm", (True,)), RequestedKnob(f"{ZERO}.reduce_bucket_size", (5, 6))
    )
    for label in ("z1", "z2", "z3"):
        assert fine(space, label)["overlap_comm"] == (True,)
        assert fine(space, label)["reduce_bucket_size"] == (5, 6)
    assert fine(space, "z0") == {}


def test_a_request_may_name_the_stages_and_fix_a_coarse_knob() -> None:
    space = adaptive(
        RequestedKnob(STAGE, (3, 1)),
        RequestedKnob(OFFLOAD_OPTIMIZER, ("cpu",)),
        RequestedKnob(OFFLOAD_PARAM, ("none",)),
    )
    assert labels(space) == ["z1-offload-optimizer", "z3-offload-optimizer"]


def test_a_request_on_a_key_outside_the_catalogue_is_varied_everywhere() -> None:
    space = adaptive(RequestedKnob("gradient_predivide_factor", (1.0, 2.0)))
    assert all("gradient_predivide_factor" in fine(space, label) for label in labels(space))
    space = adaptive(RequestedKnob("optimizer.params.lr", (0.1, 0.2)), stages=(0,))
    assert labels(space) == ["z0-lr=0.1", "z0-lr=0.2"], "it decides mathematics, and so the arm"


def test_a_condition_keeps_a_knob_to_some_arms() -> None:
    space = adaptive(RequestedKnob(f"{ZERO}.overlap_comm", (True, False), {STAGE: (3,), OFFLOAD_PARAM: ("none",)}))
    with_it = {label for label in labels(space) if "overlap_comm" in fine(space, label)}
    assert with_it == {"z3", "z3-offload-optimizer"}
    coarse = adaptive(
        RequestedKnob("bf16.enabled", (True,), {STAGE: (3,)}), RequestedKnob(OFFLOAD_OPTIMIZER, ("none",))
    )
    assert labels(coarse) == ["z0", "z1", "z2", "z3-bf16", "z3-offload-param-bf16"]


def test_what_deepspeed_refuses_is_not_tried() -> None:
    muon = adaptive(at=here(base={"optimizer": {"type": "Muon"}}), stages=(3,))
    assert fine(muon, "z3")["reduce_scatter"] == (False,), "stage 3 refuses the other"
    rank_by_rank = {ZERO: {"use_multi_rank_bucket_allreduce": False}}
    scaled = adaptive(at=here(base={"prescale_gradients": True, **rank_by_rank}), stages=(1, 2))
    assert (fine(scaled, "z1")["reduce_scatter"], fine(scaled, "z2")["reduce_scatter"]) == ((True, False), (False,))
    norm = adaptive(at=here(base={ZERO: {"stage": 1, "compute_grad_norm": False}, "gradient_clipping": 0}))
    assert labels(norm) == ["z1", "z2"]


def test_what_deepspeed_refuses_with_reduce_scatter_is_tried_without() -> None:
    scaled = adaptive(at=here(base={"prescale_gradients": True}))
    assert labels(scaled) == labels(adaptive(at=here(base={})))
    for label in ("z2", "z2-offload-optimizer", "z3"):
        assert fine(scaled, label)["reduce_scatter"] == (False,)
    assert "reduce_scatter" not in fine(scaled, "z1")


def test_what_needs_offload_is_not_tried_without() -> None:
    half = {"enabled": True, "bf16_master_weights_and_grads": True}
    base = {ZERO: {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "bf16": half}
    assert {label for label in labels(adaptive(at=here(base=base))) if "offload-optimizer" not in label} == set()


def test_bf16_that_accumulates_in_fp32_has_no_buckets_at_stage_1() -> None:
    base = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "optimizer": {"type": "AdamW"}}
    of, usual = adaptive(at=here(base=base)), adaptive()
    assert fine(of, "z1") == {}
    for label in ("z1-offload-optimizer", "z2", "z3"):
        assert fine(of, label).keys() == fine(usual, label).keys()


def test_a_knob_that_several_stages_read_is_told_with_all_of_them() -> None:
    (sentence,) = told(RequestedKnob(f"{ZERO}.overlap_comm", (True, False)), stages=(0,))
    assert sentence.endswith("DeepSpeed reads it at ZeRO stage 1 and 2 and 3 only.")


def test_contiguous_activations_stay_partitioned() -> None:
    def arms(**own: bool) -> set[object]:
        base = {"activation_checkpointing": {"partition_activations": True, **own}}
        space = adaptive(at=here(slots=8, replicas=4, base=base, reads_activation_checkpointing=True), stages=(1,))
        found = (arm.knobs.get("activation_checkpointing", {}) for arm in space.arms)
        return {checkpointing.get("partition_activations", True) for checkpointing in found}

    assert arms() == {True, False}
    assert arms(contiguous_memory_optimization=True) == {True}


def test_what_the_users_own_configuration_breaks_too_is_no_reason_to_leave_an_arm_out() -> None:
    base = {"train_batch_size": "auto", "fp16": {"enabled": True}, "bf16": {"enabled": True}}
    assert labels(adaptive(at=here(base=base))) == labels(adaptive())


def test_what_the_user_asks_for_stays_so_that_its_trial_can_say_why_not() -> None:
    space = adaptive(RequestedKnob("bf16.enabled", (True,)), at=here(base={"fp16": {"enabled": True}}), stages=(2,))
    assert "z2-bf16" in labels(space)


def test_no_two_arms_are_the_same_configuration() -> None:
    requests = RequestedKnob(OFFLOAD_OPTIMIZER, ("none", "cpu", "nvme")), RequestedKnob("bf16.enabled", (False, True))
    space = adaptive(*requests)
    assert len({repr(arm.knobs) for arm in space.arms}) == len(space.arms) == len(set(labels(space)))


def test_without_a_request_dsats_space_is_unchanged() -> None:
    base = {ZERO: {"stage": 3, "offload_param": {"device": "cpu"}}}
    at = here(base=base)
    assert build_space((1, 2, 3), at, (), catalogue=False) == SearchSpace.for_model((1, 2, 3), LARGE, base)


def test_a_request_takes_its_knobs_place_in_dsats_space() -> None:
    request = (
        RequestedKnob(f"{ZERO}.overlap_comm", (True,)),
        RequestedKnob(STAGE, (0, 2)),
        RequestedKnob(OFFLOAD_OPTIMIZER, ("none", "cpu")),
    )
    space = build_space((1, 2, 3), here(), request, catalogue=False)
    assert labels(space) == ["z0", "z2", "z2-offload-optimizer"]
    assert [knob.values for knob in arm(space, "z2").fine if "overlap" in knob.path] == [(True,)]
    assert space.size(2) == arm(space, "z2").size + arm(space, "z2-offload-optimizer").size


@pytest.mark.parametrize(
    ("request_", "at", "why"),
    [
        (RequestedKnob(f"{ZERO}.allgather_bucket_size", (2,)), here(), "DeepSpeed gathers each partition whole"),
        (RequestedKnob(f"{ZERO}.offload_optimizer.pin_memory", (True,)), here("cpu"), "it takes an accelerator"),
        (RequestedKnob(f"{ZERO}.zero_quantized_gradients", (True,)), here(), "between machines"),
        (
            RequestedKnob(f"{ZERO}.zero_quantized_nontrainable_weights", (True,)),
            here(),
            "every parameter of the model trains",
        ),
        (
            RequestedKnob(f"{ZERO}.reduce_scatter", (True,)),
            here(slots=1, replicas=1),
            "2 replicas of the model or more, here is 1",
        ),
        (RequestedKnob(f"{ZERO}.overlap_comm", (True,), {STAGE: (3,)}), here("cpu"), "stage 1 and 2 only"),
        (
            RequestedKnob("torch_autocast.enabled", (True,)),
            here(deepspeed="0.16.9"),
            "DeepSpeed 0.17.2 or later, here is 0.16.9",
        ),
        (
            RequestedKnob("steps_per_print", (1,), {STAGE: (3,), OFFLOAD_PARAM: ("nvme",)}),
            here(),
            "no candidate meets its",
        ),
        (
            RequestedKnob("communication_data_type", ("fp32",)),
            here(base={"torch_autocast": {"enabled": True}}, pipeline=False),
            None,
        ),
    ],
)
def test_people_are_told_when_a_knob_of_theirs_has_no_effect(
    request_: RequestedKnob, at: Surroundings, why: str | None
) -> None:
    sentences = told(request_, at=at)
    assert len(sentences) == (why is not None)
    if why:
        assert sentences[0].startswith(f"{request_.path} has no effect: ")
        assert why in sentences[0]
        assert sentences[0].endswith(".")


def test_a_stage_3_knob_is_told_of_where_stage_3_is_not_searched() -> None:
    request = RequestedKnob(f"{ZERO}.stage3_prefetch_bucket_size", (1, 2))
    assert told(request) == []
    (sentence,) = told(request, stages=(1, 2))
    assert sentence == f"{request.path} has no effect: DeepSpeed reads it at ZeRO stage 3 only."


def test_a_family_belongs_to_its_arm() -> None:
    space = adaptive()
    rng = random.Random(1)
    for stage in space.stages:
        for _ in range(20):
            knobs = space.family(stage, rng.randrange(space.size(stage)))
            assert [each.stage for each in space.arms if each.index(knobs) is not None] == [stage]
            assert space.family(stage, space.index(knobs)) == knobs


def test_every_effect_names_its_place_and_every_reason_reads_as_one() -> None:
    for known in KNOBS.values():
        for effect in known.effects:
            assert ".py" in effect.source
            assert bool(effect.otherwise) == (effect.holds is not None)


def test_an_arm_sets_fine_knobs_by_path() -> None:
    some = Arm(
        {ZERO: {"stage": 2}}, (Knob(f"{ZERO}.overlap_comm", (True, False)), Knob(f"{ZERO}.reduce_bucket_size", (5, 6)))
    )
    assert some.family(0) == {ZERO: {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5}}
    assert some.with_fine({f"{ZERO}.reduce_bucket_size": 6}) == some.family(2)
    assert [some.index(some.family(index)) for index in range(some.size)] == [0, 1, 2, 3]
    with pytest.raises(KeyError, match="no fine knob of z2: bf16"):
        some.with_fine({"bf16.enabled": True})


def test_knobs_with_another_value_of_a_fine_knob_are_no_family() -> None:
    space = adaptive(stages=(1, 2))
    assert space.index(arm(space, "z2").with_fine({f"{ZERO}.reduce_bucket_size": 77})) is None
