"""Which switches keep more activations, and what trials with some of them say of others."""

import pytest
from test_memory_model import GIB, MIB, OUT_OF_MEMORY, PROFILE, ran

from zerotune.trial_lib.messages.turned import ATTENTION, CHECKPOINTING, COMPILE
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.search.budgets import MemoryBasis
from zerotune.trial_lib.search.memory_model import Keeps, MemoryModel, keeps

TYPED = {CHECKPOINTING: "every_second", ATTENTION: "sdpa", COMPILE: False}


def key(**values: object) -> tuple[tuple[str, str], ...]:
    return tuple((place, repr(value)) for place, value in values.items())


@pytest.mark.parametrize(
    ("values", "beside", "expected"),
    [
        ({CHECKPOINTING: "full"}, {CHECKPOINTING: "none"}, Keeps.LESS),
        ({CHECKPOINTING: "none"}, {CHECKPOINTING: "every_second"}, Keeps.MORE),
        ({ATTENTION: "eager", CHECKPOINTING: "full"}, {ATTENTION: "sdpa", CHECKPOINTING: "full"}, Keeps.MORE),
        ({ATTENTION: "eager", CHECKPOINTING: "full"}, {ATTENTION: "sdpa", CHECKPOINTING: "none"}, Keeps.UNKNOWN),
        ({"--gradient_checkpointing": True}, {"--gradient_checkpointing": False}, Keeps.LESS),
        ({"--attn_implementation": "eager"}, {"--attn_implementation": "sdpa"}, Keeps.MORE),
        ({"--kernel": "fast"}, {"--kernel": "slow"}, Keeps.UNKNOWN),
        ({ATTENTION: "sdpa"}, {ATTENTION: "sdpa"}, Keeps.AS_MUCH),
    ],
)
def test_the_switches_that_zerotune_knows_have_an_order(
    values: dict[str, object], beside: dict[str, object], expected: Keeps
) -> None:
    assert keeps(key(**values), key(**beside)) is expected


def candidate(size: int, stage: int = 2, **switches: object) -> Candidate:
    knobs = {"zero_optimization": {"stage": stage}, "program": {**TYPED, **switches}}
    return Candidate(knobs=knobs, micro_batch_size=size, slots=4, data_parallel_size=4)


def model(device: str = "cuda", **typed: object) -> MemoryModel:
    base = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "program": {**TYPED, **typed}}
    return MemoryModel(MemoryBasis(PROFILE, base, slots=4, device=device), coarse_switches=TYPED)


def fits(memory: MemoryModel, size: int, **switches: object) -> float:
    return memory.probability_fits(candidate(size, **switches), 0.0)


def with_trials(*sizes: int, **switches: object) -> MemoryModel:
    memory = model()
    for size in sizes:
        memory.observe(candidate(size, **switches), ran(size * 260 * MIB))
    return memory


def test_a_compiled_model_needs_what_the_written_one_needs() -> None:
    memory = with_trials(8, 16, 32)
    written, compiled = (memory.above_initialize(candidate(40, **{COMPILE: on})) for on in (False, True))
    assert compiled.value == pytest.approx(written.value, rel=0.05)
    assert compiled.high < 1.4 * written.value


def test_a_compiled_model_on_a_cpu_is_a_program_of_its_own() -> None:
    memory = model("cpu")
    for size in (8, 16, 32):
        memory.observe(candidate(size), ran(size * 260 * MIB))
    written, compiled = (memory.above_initialize(candidate(40, **{COMPILE: on})) for on in (False, True))
    assert compiled.high - compiled.low > 2 * (written.high - written.low)


def test_a_program_that_keeps_less_fits_wherever_the_one_that_keeps_more_has_run() -> None:
    memory = with_trials(8, 16, 32)
    assert fits(memory, 32) == 1.0
    assert fits(memory, 32, **{CHECKPOINTING: "full"}) == 1.0
    assert fits(memory, 32, **{CHECKPOINTING: "none"}) < 0.5


def test_a_program_that_keeps_more_does_not_fit_where_the_one_that_keeps_less_failed() -> None:
    memory = with_trials(4)
    small = 6
    none = {CHECKPOINTING: "none"}
    for attention in ("eager", "sdpa"):
        assert fits(memory, small, **none, **{ATTENTION: attention}) > 0.05
    memory.observe(candidate(small, **none, **{ATTENTION: "flash_attention_2"}), OUT_OF_MEMORY)
    for attention in ("eager", "sdpa"):
        assert fits(memory, small, **none, **{ATTENTION: attention}) == 0.0
    assert fits(memory, small, **{CHECKPOINTING: "full"}) > 0.9


def test_a_failure_of_sdpa_rules_out_no_attention_as_written() -> None:
    memory, small = with_trials(4), 6
    none = {CHECKPOINTING: "none"}
    memory.observe(candidate(small, **none), OUT_OF_MEMORY)
    # Without a fused kernel, `sdpa` keeps more than attention as written.
    assert fits(memory, small, **none, **{ATTENTION: "eager"}) > 0.0
    assert keeps(key(**{ATTENTION: "eager"}), key(**{ATTENTION: "sdpa"})) is Keeps.MORE
    assert keeps(key(**{ATTENTION: "eager"}), key(**{ATTENTION: "sdpa"}), surely=True) is Keeps.UNKNOWN
    flash = key(**{ATTENTION: "flash_attention_2"})
    assert keeps(key(**{ATTENTION: "eager"}), flash, surely=True) is Keeps.MORE
    assert keeps(key(**{ATTENTION: "sdpa"}), flash, surely=True) is Keeps.MORE


def test_attention_as_written_is_expected_to_fit_only_where_sdpa_would_until_it_has_run() -> None:
    memory, none, eager = with_trials(4), {CHECKPOINTING: "none"}, {ATTENTION: "eager"}
    before = fits(memory, 16, **none, **eager)
    memory.observe(candidate(2, **none), ran(2 * 6 * GIB))
    assert fits(memory, 16, **none, **eager) <= fits(memory, 16, **none) < before / 2
    # Here sdpa has no fused kernel, and keeps more.
    memory.observe(candidate(2, **none, **eager), ran(2 * GIB))
    memory.observe(candidate(8, **none, **eager), ran(8 * GIB))
    assert fits(memory, 12, **none, **eager) > 0.9


def test_a_program_that_recomputes_every_second_block_keeps_half_of_what_it_keeps_without() -> None:
    memory = model(**{CHECKPOINTING: "full"})
    for size in (8, 16, 32):
        memory.observe(candidate(size, **{CHECKPOINTING: "full"}), ran(size * 260 * MIB))
    before = fits(memory, 16)
    memory.observe(candidate(2, **{CHECKPOINTING: "none"}), ran(2 * 6 * GIB))
    assert fits(memory, 3) > 0.5
    assert fits(memory, 16) <= fits(memory, 8, **{CHECKPOINTING: "none"}) < before / 2
    assert fits(memory, 16, **{ATTENTION: "eager"}) <= fits(memory, 8, **{CHECKPOINTING: "none"})
    # Its own trials count more.
    memory.observe(candidate(3), ran(3 * GIB))
    memory.observe(candidate(8), ran(8 * GIB))
    assert fits(memory, 12) > 0.9


def test_trials_with_other_switches_bound_a_program_that_has_run_itself() -> None:
    memory, none, full = with_trials(4), {CHECKPOINTING: "none"}, {CHECKPOINTING: "full"}
    memory.observe(candidate(4, **none), ran(4 * 270 * MIB))
    memory.observe(candidate(4, **full), ran(4 * 250 * MIB))
    assert fits(memory, 40, **none) < 1.0
    assert fits(memory, 6, **none) > 0.0
    memory.observe(candidate(40), ran(40 * 260 * MIB))
    assert fits(memory, 40, **full) == 1.0
    memory.observe(candidate(41), OUT_OF_MEMORY)
    assert fits(memory, 41, **none) == 0.0
    assert fits(memory, 41, **full) > 0.0


def test_a_trial_with_its_own_switches_counts_more_than_one_with_others() -> None:
    memory = with_trials(8, 16, 32)
    none = {CHECKPOINTING: "none"}
    memory.observe(candidate(8, **none), ran(8 * 270 * MIB))
    memory.observe(candidate(32, **none), ran(32 * 270 * MIB))
    assert fits(memory, 32, **none) == 1.0
    assert memory.above_initialize(candidate(40, **none)).value > memory.above_initialize(candidate(40)).value


def test_activations_that_were_recomputed_are_expected_to_be_many_more_without() -> None:
    memory = with_trials(8, 16, 32)
    recomputed, kept = (memory.above_initialize(candidate(8, **{CHECKPOINTING: each})) for each in ("full", "none"))
    assert recomputed.value < kept.value / 2
