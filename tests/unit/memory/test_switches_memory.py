"""What the memory model says of a program with other switches than those that have run."""

from test_memory_model import HEADROOM, MIB, PROFILE, ran

from trial_lib.memory.memory_basis import MemoryBasis
from trial_lib.memory.memory_model import MemoryModel
from trial_lib.records.candidate import Candidate

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
