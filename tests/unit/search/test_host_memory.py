"""The host's memory is a budget of its own: it bounds what offloads, and teaches the device's model nothing."""

from dataclasses import replace

import pytest

from zerotune.trial_lib.messages.measurement import Memory, ModelProfile
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.search.allocations import ForeseenArm, SizeLine
from zerotune.trial_lib.search.budgets import HostMemory, MemoryBasis
from zerotune.trial_lib.search.knobs import Arm, Knob
from zerotune.trial_lib.search.memory_model import MemoryModel

GIB = 2**30
SLOTS = 8
HEADROOM = 0.05
# 7 billion parameters on eight devices of 80 GiB: a rank offloads some 17 GB.
PROFILE = ModelProfile(
    num_params=7_000_000_000,
    trainable_num_params=7_000_000_000,
    activation_mem_per_gpu=3 * GIB,
    gpu_mem=78 * GIB,
    host_mem=100 * GIB,
    data_parallel_size=SLOTS,
    flops_per_sample=1e12,
)
BASE = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}
UNPINNED = {"device": "cpu", "pin_memory": False}


def candidate(stage: int, offload: dict[str, object] | None = None, size: int = 4, accumulation: int = 1) -> Candidate:
    zero = {"stage": stage, "reduce_bucket_size": 50_000_000}
    zero |= {} if offload is None else {"offload_optimizer": offload}
    return Candidate(
        knobs={"zero_optimization": zero},
        micro_batch_size=size,
        gradient_accumulation_steps=accumulation,
        slots=SLOTS,
        data_parallel_size=SLOTS,
    )


def memory(
    host_gib: float = 100, device: str = "cuda", foreseen: tuple[ForeseenArm, ...] = (), **base: object
) -> HostMemory:
    profile = replace(PROFILE, host_mem=int(host_gib * GIB))
    return HostMemory(MemoryBasis(profile, {**BASE, **base}, SLOTS, device, foreseen))


def foreseen_arm(host_gib: float, of: Candidate) -> ForeseenArm:
    line = SizeLine(0.0)
    return ForeseenArm(ds_config=of.complete(BASE), initialize=line, backward=line, update=line, host=host_gib * GIB)


def ended(outcome: Outcome, from_outside: bool = False, above: float = 0) -> TrialResult:
    taken = Memory(peak=[int(above)], after_initialize=[0], available=[60 * GIB]) if above else Memory()
    return TrialResult(
        trial_id="s-1",
        number=1,
        purpose=Purpose.SEARCH,
        config_hash="0",
        outcome=outcome,
        from_outside=from_outside,
        memory=taken,
    )


OFFLOADED, ON_DEVICE = candidate(2, {"device": "cpu"}), candidate(2)


def test_what_offloads_has_to_fit_into_what_the_profile_found_free_less_a_reserve() -> None:
    needed = memory().needed(OFFLOADED) / GIB
    assert 15 < needed < 20
    assert memory(needed / 0.9 + 0.1).fits(OFFLOADED)
    assert not memory(needed / 0.9 - 0.1).fits(OFFLOADED)
    assert memory(1).fits(ON_DEVICE)


def test_the_same_for_every_size_unless_it_accumulates() -> None:
    assert memory().needed(OFFLOADED) == memory().needed(candidate(2, {"device": "cpu"}, size=64))
    assert memory().needed(candidate(2, {"device": "cpu"}, accumulation=4)) > memory().needed(OFFLOADED)


def test_a_cpus_slots_have_one_memory() -> None:
    assert memory(1, device="cpu").fits(OFFLOADED)
    assert memory(1, device="cpu").needed(OFFLOADED) == 0
    assert memory(1, device="cpu").limit is None


def test_a_host_that_nobody_has_asked_bounds_nothing() -> None:
    assert memory(0).fits(OFFLOADED)
    assert memory(0).lack(OFFLOADED) == ""


def test_what_the_users_own_configuration_offloads_was_there_beside_what_was_free() -> None:
    own = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    assert memory(1, **own).fits(OFFLOADED)


def test_running_out_of_it_bounds_the_arm_by_what_that_needed_of_the_host() -> None:
    host = memory()
    host.observe(OFFLOADED, ended(Outcome.OUT_OF_HOST_MEMORY))
    assert not host.fits(OFFLOADED)
    assert not host.fits(candidate(2, {"device": "cpu"}, size=1))
    assert host.fits(candidate(2, UNPINNED))
    assert host.fits(candidate(3, {"device": "cpu"}))
    assert host.fits(ON_DEVICE)


def test_what_has_run_fits_whatever_the_sum_says() -> None:
    host = memory(1)
    host.observe(OFFLOADED, ended(Outcome.COMPLETED))
    assert host.fits(OFFLOADED)


def test_who_found_the_memory_taken_by_others_says_nothing_of_the_candidate() -> None:
    host = memory()
    host.observe(OFFLOADED, ended(Outcome.OUT_OF_HOST_MEMORY, from_outside=True))
    assert host.fits(OFFLOADED)


def test_why_an_arm_is_not_tried_is_said() -> None:
    pin = Knob("zero_optimization.offload_optimizer.pin_memory", (True, False))
    plain = Arm({"zero_optimization": {"stage": 2}})
    offloading = [{"stage": stage, "offload_optimizer": {"device": "cpu"}} for stage in (2, 3)]
    arms = [plain, *(Arm({"zero_optimization": zero}, (pin,)) for zero in offloading)]
    (two, three) = memory(10).without_room(arms)
    assert two == (
        "z2-offload-optimizer is not tried: it would keep 14.7 GiB in the host's memory for each of its ranks, and "
        "there is room for 9.0 GiB each, 10% of it kept free."
    )
    assert three.startswith("z3-offload-optimizer is not tried")
    # Without locked pages there is room.
    assert not list(memory(16.5).without_room(arms))


def test_the_devices_model_learns_nothing_of_the_host() -> None:
    def largest(model: MemoryModel, stage: int) -> int:
        knobs = candidate(stage).knobs
        return model.largest_micro_batch(knobs, lambda size: candidate(stage, size=size), 64, HEADROOM, 0.9)

    model = MemoryModel(MemoryBasis(PROFILE, BASE, SLOTS, "cuda"))
    for stage, size in ((2, 2), (2, 4), (3, 2), (3, 4)):
        model.observe(candidate(stage, size=size), ended(Outcome.COMPLETED, above=(6 + 4 * size) * GIB))
    before = [largest(model, stage) for stage in (2, 3)]
    for stage in (2, 3):
        model.observe(candidate(stage, {"device": "cpu"}), ended(Outcome.OUT_OF_HOST_MEMORY))
    assert [largest(model, stage) for stage in (2, 3)] == before
    # As the device's own it would have halved them.
    for stage in (2, 3):
        model.observe(candidate(stage, {"device": "cpu"}), ended(Outcome.OUT_OF_MEMORY))
    assert all(now < then for now, then in zip([largest(model, stage) for stage in (2, 3)], before, strict=True))


@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_arm_of_the_users_own_configuration_is_known_by_other_names(accumulation: int) -> None:
    own = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    host = memory(**own)
    plain = Candidate(micro_batch_size=1, gradient_accumulation_steps=accumulation, slots=SLOTS)
    assert host.needed(plain) == host.needed(candidate(2, {"device": "cpu"}, accumulation=accumulation))


def test_the_foreseen_bytes_of_an_arm_count_in_the_place_of_the_formula() -> None:
    arms = (foreseen_arm(40, OFFLOADED), foreseen_arm(3, ON_DEVICE))
    host = memory(foreseen=arms)
    assert host.needed(OFFLOADED) == 40 * GIB
    assert memory(50, foreseen=arms).fits(OFFLOADED)
    assert memory(40).fits(OFFLOADED)
    assert not memory(40, foreseen=arms).fits(OFFLOADED)
    # The program's data are on the host in every arm, and were there when the rest was free.
    assert host.needed(ON_DEVICE) == 0
    assert memory(40, "cpu", arms).fits(OFFLOADED)


def test_the_formulas_give_the_difference_to_other_settings_of_a_foreseen_arm() -> None:
    arms = (foreseen_arm(40, OFFLOADED),)
    unpinned, accumulating = candidate(2, UNPINNED), candidate(2, {"device": "cpu"}, accumulation=4)
    for other in (unpinned, accumulating):
        difference = memory().needed(other) - memory().needed(OFFLOADED)
        assert difference != 0
        assert memory(foreseen=arms).needed(other) == 40 * GIB + difference
    # No run has foreseen the other arm.
    assert memory(foreseen=arms).needed(candidate(3, {"device": "cpu"})) == memory().needed(
        candidate(3, {"device": "cpu"})
    )


def test_a_sentence_says_that_an_arm_is_foreseen_to_have_no_room() -> None:
    arm = Arm({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})
    assert not list(memory(40).without_room([arm]))
    (sentence,) = memory(40, foreseen=(foreseen_arm(40, OFFLOADED),)).without_room([arm])
    assert sentence.startswith("z2-offload-optimizer is not tried: it would keep 40.0 GiB in the host's memory")
    assert "36.0 GiB each" in sentence
