"""What a candidate changes in the user's configuration, and what is left of it without some changes."""

import random
from typing import Any

import pytest
from arms_of_space import ZERO, adaptive, arm, here

from zerotune.trial_lib.deepspeed_config.layout import AUTOTP
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.search.arms import Refusals, RequestedKnob, build_space
from zerotune.trial_lib.search.changes import Changes
from zerotune.trial_lib.search.effects import Surroundings
from zerotune.trial_lib.search.knobs import STAGE

OWN_OFFLOAD = {ZERO: {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}
ON_NVME = {ZERO: {"stage": 3, "offload_param": {"device": "cpu", "nvme_path": "/nvme"}}, "optimizer": {"type": "AdamW"}}
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
COMPILE = RequestedKnob("program.--compile", (False, True), coarse=True)
WORKERS = RequestedKnob("program.--workers", (0, 2), coarse=False)
AUTOCAST = RequestedKnob("torch_autocast.enabled", (False, True))
WITH_ADAM = RequestedKnob("optimizer.params.torch_adam", (False, True))
FUSED = RequestedKnob("optimizer.params.fused", (False, True), when={"optimizer.params.torch_adam": (True,)})


def candidate(knobs: dict[str, Any], size: int = 4, accumulation: int = 2, replicas: int | None = 8) -> Candidate:
    return Candidate(
        knobs=knobs,
        micro_batch_size=size,
        gradient_accumulation_steps=accumulation,
        slots=8,
        data_parallel_size=replicas,
    )


OWN = candidate({}, 1, 8)


def paths(changes: Changes) -> set[str]:
    return {change.path.removeprefix(f"{ZERO}.") for change in changes.all}


def without(changes: Changes, *names: str) -> Candidate | None:
    return changes.without([each for each in changes.all if each.path.removeprefix(f"{ZERO}.") in names])


@pytest.mark.parametrize("catalogue", [True, False])
@pytest.mark.parametrize(
    ("base", "requests", "device"),
    [
        (ADAM, (), "cuda"),
        (OWN_OFFLOAD, (), "cuda"),
        (OWN_OFFLOAD, (), "cpu"),
        (ON_NVME, (), "cuda"),
        ({ZERO: {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}, **ADAM}, (), "cuda"),
        ({ZERO: True}, (), "cuda"),
        ({ZERO: {"stage": 3, "max_live_parameters": 10**8}}, (), "cuda"),
        ({ZERO: {"stage": 3}, "program": {"--compile": None, "--workers": 0}}, (COMPILE, WORKERS), "cuda"),
        (ADAM, (AUTOCAST, WITH_ADAM, FUSED), "cpu"),
    ],
)
def test_a_candidate_without_none_of_its_changes_is_itself_and_without_all_it_is_the_users(
    base: dict[str, Any], requests: tuple[RequestedKnob, ...], device: str, catalogue: bool
) -> None:
    at, draw = here(device, base=base), random.Random(1)
    refusals = Refusals(at)
    for each in build_space((0, 1, 2, 3), at, requests, catalogue=catalogue).arms:
        for index in {0, each.size - 1, *(draw.randrange(each.size) for _ in range(5))}:
            one = candidate(each.family(index))
            changes = Changes(one, OWN, at, requests)
            same = changes.without(())
            assert same is not None
            if not refusals.has(one.knobs, {}):
                assert same.complete(base) == one.complete(base)
            assert changes.left_in(same) == {change.path for change in changes.all}
            bare = changes.without(changes.all)
            assert bare is not None
            assert changes.left_in(bare) == frozenset()
            assert (bare.micro_batch_size, bare.gradient_accumulation_steps) == (1, 8)


def test_every_single_change_can_be_dropped_alone_or_with_what_depends_on_it() -> None:
    for base in (ADAM, OWN_OFFLOAD, ON_NVME):
        at = here(base=base)
        for each in adaptive(at=at).arms:
            changes = Changes(candidate(each.family(each.size - 1)), OWN, at, ())
            for change in changes.all:
                reduced = changes.without([change])
                assert reduced is not None, (base, each.label, change)
                assert change.path not in changes.left_in(reduced)
                assert not Refusals(at).has(reduced.knobs, {})


def test_what_only_a_stage_reads_falls_with_the_stage() -> None:
    at = here(base={ZERO: {"stage": 1}, **ADAM})
    knobs = arm(adaptive(at=at), "z3-offload-param").family(1)
    changes = Changes(candidate(knobs), OWN, at, ())
    assert {"stage", "offload_param.device", "stage3_prefetch_bucket_size"} <= paths(changes)
    reduced = without(changes, "stage")
    assert reduced is not None
    assert not {path for path in changes.left_in(reduced) if "stage3" in path or "offload" in path}
    assert reduced.knobs[ZERO]["stage"] == 1
    assert reduced.micro_batch_size == 4


def test_the_micro_batch_and_its_accumulation_are_one_change() -> None:
    changes = Changes(candidate({ZERO: {"stage": 0}}), OWN, here(base=ADAM), ())
    assert [(change.knob, change.value, change.own) for change in changes.all] == [("micro-batch", (4, 2), (1, 8))]


def test_a_switch_of_the_program_is_a_change_like_any_other() -> None:
    base = {ZERO: {"stage": 2}, "program": {"--compile": None, "--workers": 0}}
    at = here(base=base)
    knobs = {ZERO: {"stage": 2}, "program": {"--compile": True, "--workers": 2}}
    changes = Changes(candidate(knobs, 1, 8), OWN, at, (COMPILE, WORKERS))
    assert [(change.knob, change.is_fine) for change in changes.all] == [("--compile", False), ("--workers", True)]
    reduced = without(changes, "program.--workers")
    assert reduced is not None
    assert reduced.complete(base)["program"] == {"--compile": True, "--workers": 0}


def test_groups_that_fall_keep_the_global_batch_or_cannot_fall_alone() -> None:
    base = {"tensor_parallel": {"autotp_size": 4}, ZERO: {"stage": 1}, **ADAM}
    at: Surroundings = here(base=base, replicas=2)
    own = candidate({}, 8, 1, 2)

    def changed(size: int, accumulation: int) -> Candidate | None:
        grouped = {ZERO: {"stage": 1}, "tensor_parallel": {"autotp_size": 2}}
        changes = Changes(candidate(grouped, size, accumulation, 4), own, at, ())
        return without(changes, AUTOTP)

    kept = changed(2, 2)
    assert kept is not None
    assert (kept.micro_batch_size, kept.gradient_accumulation_steps, kept.data_parallel_size) == (2, 4, 2)
    fewer = here(base={"tensor_parallel": {"autotp_size": 1}, ZERO: {"stage": 1}, **ADAM})
    grouped = {ZERO: {"stage": 1}, "tensor_parallel": {"autotp_size": 2}}
    assert without(Changes(candidate(grouped, 2, 1, 4), candidate({}, 1, 1), fewer, ()), AUTOTP) is None


def test_a_setting_that_deepspeed_needs_beside_another_falls_with_it() -> None:
    at = here(base={ZERO: {"stage": 2}, "bf16": {"enabled": True}, **ADAM})
    for each in adaptive(at=at).arms:
        for index in range(min(each.size, 40)):
            changes = Changes(candidate(each.family(index)), OWN, at, ())
            for change in changes.all:
                reduced = changes.without([change])
                assert reduced is None or not Refusals(at).has(reduced.knobs, {})


def test_the_stage_of_a_configuration_without_a_section_is_0() -> None:
    changes = Changes(candidate({ZERO: {"stage": 2}}), OWN, here(base=ADAM), ())
    assert next((change.path, change.own) for change in changes.all) == (STAGE, 0)
