"""What a caching allocator adds to what tensors take: a headroom that is really free, and trials at the edge."""

from zerotune.trial_lib.messages.measurement import Memory, ModelProfile
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.search.budgets import MemoryBasis
from zerotune.trial_lib.search.memory_model import MemoryModel, measured_above_initialize

MIB, GIB = 2**20, 2**30
PROFILE = ModelProfile(
    num_params=500_000_000,
    trainable_num_params=500_000_000,
    activation_mem_per_gpu=300 * MIB,
    gpu_mem=24 * GIB,
    data_parallel_size=4,
    flops_per_sample=1e12,
)
HEADROOM = 0.05
BASE = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}


def candidate(size: int, stage: int = 2) -> Candidate:
    knobs = {"zero_optimization": {"stage": stage, "reduce_bucket_size": 50_000_000}}
    return Candidate(knobs=knobs, micro_batch_size=size, slots=4, data_parallel_size=4)


def ran(above: float, unusable: float = 0, retries: int = 0, initialize_peak: float = 0) -> TrialResult:
    above, available, after = int(above), 20 * GIB, 3 * GIB
    memory = Memory(
        peak=[int(max(after + above, initialize_peak))],
        steps_peak=[after + above],
        after_initialize=[after],
        available=[available],
        peak_reserved=[after + above + int(unusable)],
        allocator_retries=[retries],
        counted_retries=[retries],
        least_free=[available - above - int(unusable)],
    )
    return TrialResult(
        trial_id="s-1", number=1, purpose=Purpose.SEARCH, config_hash="0", outcome=Outcome.COMPLETED, memory=memory
    )


def model(*trials: tuple[Candidate, TrialResult]) -> MemoryModel:
    made = MemoryModel(MemoryBasis(PROFILE, BASE, slots=4, device="cuda"))
    for trial in trials:
        made.observe(*trial)
    return made


def taken(size: int) -> float:
    return 2 * GIB + 1.3 * size * 300 * MIB


def trials(unusable: float) -> list[tuple[Candidate, TrialResult]]:
    return [(candidate(size), ran(taken(size), unusable)) for size in (4, 8, 16)]


def largest(made: MemoryModel, headroom: float) -> int:
    knobs = candidate(1).knobs
    return made.largest_micro_batch(knobs, candidate, 256, headroom, 0.9)


def test_the_headroom_is_kept_free_of_pieces_and_of_what_is_not_pytorchs() -> None:
    tidy, in_pieces = model(*trials(0)), model(*trials(4 * GIB))
    lost = largest(tidy, 0.05) - largest(in_pieces, 0.05)
    assert 8 <= lost <= 12  # 4 GiB, at 390 MiB a sample
    # What merely has to run gets the pieces in need.
    assert largest(tidy, 0.0) == largest(in_pieces, 0.0)


def test_another_arm_is_taken_to_have_as_much_in_pieces() -> None:
    tidy, in_pieces = model(*trials(0)), model(*trials(4 * GIB))
    other = candidate(36, stage=1)
    assert in_pieces.probability_fits(other, HEADROOM) < tidy.probability_fits(other, HEADROOM)


def test_a_trial_at_the_edge_is_no_certain_fit() -> None:
    edge = 19.5 * GIB
    steady, short = (model((candidate(40), ran(edge, retries=retries))) for retries in (0, 2))
    assert steady.probability_fits(candidate(40), HEADROOM) == 1.0
    assert short.probability_fits(candidate(40), HEADROOM) < 0.9
    # Its peak counts all the same.
    before = model().above_initialize(candidate(40)).value
    assert abs(short.above_initialize(candidate(40)).value - edge) < abs(before - edge)


def test_what_initialisation_took_for_a_moment_is_not_in_the_steps_peak() -> None:
    result = ran(1 * GIB, initialize_peak=9 * GIB)
    assert measured_above_initialize(result.memory) == 1 * GIB
