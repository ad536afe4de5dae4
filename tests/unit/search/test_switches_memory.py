"""What the memory model says of a program with other switches than those that have run."""

import pytest
from test_memory_model import HEADROOM, MIB, PROFILE, ran

from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.search.allocations import ForeseenArm, SizeLine
from zerotune.trial_lib.search.budgets import MemoryBasis
from zerotune.trial_lib.search.memory_model import MemoryModel

BASE = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "program": {"--gc": False, "OMP": 1}}


def candidate(size: int, **switches: object) -> Candidate:
    knobs = {"zero_optimization": {"stage": 2}, "program": switches}
    return Candidate(knobs=knobs, micro_batch_size=size, slots=4, data_parallel_size=4)


def model(*coarse: str) -> MemoryModel:
    return MemoryModel(MemoryBasis(PROFILE, BASE, slots=4, device="cuda"), coarse_switches=coarse)


def spread(memory: MemoryModel, of: Candidate) -> float:
    expected = memory.above_initialize(of)
    return (expected.high - expected.low) / expected.value


def test_trials_with_another_coarse_switch_say_little_of_a_candidate() -> None:
    memory = model("--gc")
    for size in (8, 16, 32):
        memory.observe(candidate(size, **{"--gc": False}), ran(size * 260 * MIB))
    known, other = candidate(40, **{"--gc": False}), candidate(40, **{"--gc": True})
    assert spread(memory, other) > 2 * spread(memory, known)


def test_a_switch_that_is_the_size_of_a_layout_shares_what_is_known() -> None:
    base = {**BASE, "program": {"--tp": 1}, "layouts": {"--tp": "tensor"}}
    memory = MemoryModel(MemoryBasis(PROFILE, base, slots=4, device="cuda"), coarse_switches=["--tp"])
    for size in (8, 16, 32):
        memory.observe(candidate(size, **{"--tp": 1}), ran(size * 260 * MIB))
    assert spread(memory, candidate(40, **{"--tp": 2})) < 2 * spread(memory, candidate(40, **{"--tp": 1}))


def test_a_program_that_keeps_an_eighth_of_its_activations_is_learned_from_two_trials() -> None:
    memory, on = model("--gc"), {"--gc": True}
    for size in (8, 16, 32):
        memory.observe(candidate(size, **{"--gc": False}), ran(size * 260 * MIB))
    large = candidate(200, **on)
    assert memory.probability_fits(large, HEADROOM) < 0.75
    for size in (8, 32):
        memory.observe(candidate(size, **on), ran(size * 30 * MIB + 300 * MIB))
    assert memory.probability_fits(large, HEADROOM) > 0.9
    assert memory.probability_fits(candidate(200, **{"--gc": False}), HEADROOM) < 0.01


def test_a_fine_switch_shares_what_is_known() -> None:
    memory = model()
    for size in (8, 16, 32):
        memory.observe(candidate(size, OMP=1), ran(size * 260 * MIB))
    assert memory.above_initialize(candidate(40, OMP=2)) == memory.above_initialize(candidate(40, OMP=1))


def test_a_foreseen_arm_has_the_activations_of_its_own_switches() -> None:
    place = "model:activation_checkpointing"
    base = {**BASE, "program": {place: "none"}}

    def arm(kind: str, per_sample: float) -> ForeseenArm:
        line = SizeLine(100.0 * MIB, per_sample)
        config = {**base, "zero_optimization": {"stage": 2}, "program": {place: kind}}
        return ForeseenArm(ds_config=config, initialize=SizeLine(0.0), backward=line, update=SizeLine(100.0 * MIB))

    basis = MemoryBasis(
        PROFILE, base, slots=4, device="cuda", foreseen=(arm("none", 260.0 * MIB), arm("full", 30.0 * MIB))
    )
    memory = MemoryModel(basis, coarse_switches=(place,))
    none, full = (memory.above_initialize(candidate(40, **{place: kind})) for kind in ("none", "full"))
    assert full.value < 0.3 * none.value
    assert spread(memory, candidate(40, **{place: "full"})) < 1.5
    unknown = candidate(40, **{place: "every_second"})
    assert spread(memory, unknown) > 1.5 * spread(memory, candidate(40, **{place: "full"}))


@pytest.mark.parametrize(("device", "shows"), [("cuda", True), ("cpu", False)])
def test_a_foreseen_arm_on_a_cpu_does_not_say_that_it_is_compiled(device: str, shows: bool) -> None:
    """No foreseen run has the compiler, which stays in the resident memory of a rank there."""
    line = SizeLine(100.0 * MIB)
    config = {"zero_optimization": {"stage": 2}, "program": {"model:compile": True, "model:attention": "eager"}}
    arm = ForeseenArm(ds_config=config, initialize=line, backward=line, update=line)
    (found,) = MemoryBasis(PROFILE, BASE, slots=4, device=device, foreseen=(arm,)).arms
    assert ("model:compile" in found.ds_config["program"]) == shows
    assert found.ds_config["program"]["model:attention"] == "eager"
