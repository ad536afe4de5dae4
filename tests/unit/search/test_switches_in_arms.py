"""The program's switches in a search space: as arms, as fine knobs, and in the names of candidates."""

from typing import Any

import pytest
from arms_of_space import adaptive, arm, here, labels, told

from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.search.arms import CandidateNames, RequestedKnob, build_space
from zerotune.trial_lib.search.knobs import STAGE, SearchSpace, get_knob, leaves, set_knob

GC = RequestedKnob("program.--gc", (True, False), coarse=True)
THREADS = RequestedKnob("program.OMP_NUM_THREADS", (1, 2), coarse=False)
BASE = {
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 1},
    "program": {"--gc": False, "OMP_NUM_THREADS": 1},
}


def space_of(*requests: RequestedKnob, catalogue: bool = True, base: dict[str, Any] | None = None) -> SearchSpace:
    return build_space((0, 1), here("cpu", base=base or BASE), requests, catalogue=catalogue)


@pytest.mark.parametrize("catalogue", [True, False])
def test_a_coarse_switch_makes_arms_and_a_fine_one_varies_within_each(catalogue: bool) -> None:
    space = space_of(GC, THREADS, catalogue=catalogue)
    assert sorted(labels(space)) == ["z0", "z0-gc", "z1", "z1-gc"]
    for each in space.arms:
        assert [knob.values for knob in each.fine if knob.path == THREADS.path] == [(1, 2)]
    assert space.coarse_switches == {"--gc"}


def test_every_family_has_the_switches_and_is_found_again() -> None:
    space = space_of(GC, THREADS)
    found = set()
    for number, each in enumerate(space.arms):
        for index in range(each.size):
            knobs = each.family(index)
            assert space.locate(knobs) == (number, index)
            found.add((knobs["program"]["--gc"], knobs["program"]["OMP_NUM_THREADS"]))
    assert found == {(True, 1), (True, 2), (False, 1), (False, 2)}


def test_the_users_configuration_is_a_place_in_the_space_and_has_the_hash_of_the_candidate_that_repeats_it() -> None:
    space = space_of(GC, THREADS)
    number, index = space.locate_config(BASE) or (-1, -1)
    knobs = space.arms[number].family(index)
    assert (knobs["program"], space.arms[number].label) == (BASE["program"], "z1")
    other = Candidate(knobs={"program": {"--gc": True}}, micro_batch_size=1)
    repeats = Candidate(knobs={"program": dict(BASE["program"])}, micro_batch_size=1)
    own = Candidate(micro_batch_size=1)
    assert repeats.config_hash(BASE) == own.config_hash(BASE) != other.config_hash(BASE)


def test_deepspeed_gets_no_switches_and_the_family_has_them() -> None:
    one, other = (Candidate(knobs={"program": {"--a.b": value}}, micro_batch_size=2) for value in (1, 2))
    assert "program" not in one.overrides
    assert one.switches == {"--a.b": 1}
    assert one.family != other.family
    assert Candidate.model_validate_json(one.model_dump_json()) == one


def test_null_is_the_value_as_typed() -> None:
    asked = RequestedKnob("program.--attn", (None, "eager"), coarse=True)
    typed = space_of(asked, base={**BASE, "program": {"--attn": "sdpa"}})
    assert [get_knob(each.knobs, asked.path) for each in typed.arms] == ["sdpa", "eager"] * 2
    assert len(space_of(asked, base={**BASE, "program": {"--attn": "eager"}}).arms) == 2
    absent = space_of(asked, base={**BASE, "program": {"--attn": None}})
    assert sorted(labels(absent)) == ["z0", "z0-attn=eager", "z1", "z1-attn=eager"]


def test_conditions_hold_between_switches_and_the_stage() -> None:
    of_1 = RequestedKnob("program.--gc", (True, False), {STAGE: (1,)}, coarse=True)
    of_gc = RequestedKnob("program.--level", (1, 2), {"program.--gc": (True,)}, coarse=True)
    space = space_of(of_1, of_gc)
    assert sorted(labels(space)) == ["z0", "z1", "z1-gc-level=1", "z1-gc-level=2"]
    never = RequestedKnob("program.--level", (1, 2), {STAGE: (3,)}, coarse=True)
    assert told(never, stages=(0, 1)) == ["program.--level has no effect: no candidate meets its condition."]


def test_a_condition_on_what_a_stage_withdraws_reads_what_the_candidate_has() -> None:
    """At stage 0 DeepSpeed offloads no optimizer, so there the user's own offload counts as none."""
    offload = "zero_optimization.offload_optimizer.device"
    of_offload = RequestedKnob("program.--a", (1, 2), {offload: ("cpu",)}, coarse=True)
    of_none = RequestedKnob("program.--b", (1, 2), {offload: ("none",)}, coarse=True)
    own = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}, "program": {"--a": 1, "--b": 1}}
    space = space_of(of_offload, of_none, base={**BASE, **own})
    varied = {(each.stage, get_knob(each.knobs, offload), *each.knobs["program"]) for each in space.arms}
    assert varied == {(0, None, "--b"), (1, None, "--b"), (1, "cpu", "--a")}


def test_names_tell_switches_apart() -> None:
    names = CandidateNames()
    places: list[dict[str, Any]] = [
        {"--gc": True, "--attn_impl": "sdpa", "OMP_NUM_THREADS": 1},
        {"--gc": False, "--attn_impl": "eager", "OMP_NUM_THREADS": 2},
        {"--gc": None, "a.b": False, "conf.yaml:x.y": 3},
    ]
    knobs = [{"zero_optimization": {"stage": 1}, "program": each} for each in places]
    assert [names.of(Candidate(knobs=each, micro_batch_size=4)) for each in knobs] == [
        "z1-OMP_NUM_THREADS=1-attn-impl=sdpa-gc-mbs4",
        "z1-OMP_NUM_THREADS=2-attn-impl=eager-mbs4",
        "z1-a.b=false-conf.yaml:x.y=3-mbs4",
    ]


def test_the_place_of_a_switch_is_one_key_whatever_dots_it_has() -> None:
    config: dict[str, Any] = {}
    set_knob(config, "program.conf.yaml:a.b", 1)
    set_knob(config, "program.--trainer.x", True)
    assert config == {"program": {"conf.yaml:a.b": 1, "--trainer.x": True}}
    assert dict(leaves(config)) == {"program.conf.yaml:a.b": 1, "program.--trainer.x": True}
    assert get_knob(config, "program.--trainer.x") is True


def test_one_value_fixes_a_switch() -> None:
    space = adaptive(RequestedKnob("program.--gc", (True,), coarse=True), at=here("cpu"), stages=(0, 2))
    assert labels(space) == ["z0-gc", "z2-gc"]
    assert arm(space, "z2-gc").knobs["program"] == {"--gc": True}
