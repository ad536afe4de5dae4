"""The answer of a study is worded in one place, as a line that stands alone."""

from pathlib import Path

from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.units import gain_line, name_of


def test_the_answer_has_the_gain_its_interval_and_the_configuration() -> None:
    line = gain_line(2.534, "ZeRO 0, micro-batch 64, accumulation 2", (2.185, 2.919))
    assert line == (
        "2.53x faster than your configuration (95 % CI 2.19 to 2.92): ZeRO 0, micro-batch 64, accumulation 2"
    )
    assert "(99 % CI " in gain_line(2.5, "ZeRO 1", (2.0, 3.0), error=0.01)


def test_the_example_of_the_first_pages_is_what_a_study_prints() -> None:
    line = gain_line(2.21, "ZeRO 2, micro-batch 64, accumulation 2", (1.92, 2.54))
    for page in ("README.md", "docs/index.md", "docs/tuning.md"):
        assert line in (Path(__file__).parents[3] / page).read_text(), page


def test_a_gain_without_an_interval_says_that_it_is_not_confirmed() -> None:
    line = gain_line(1.5, "micro-batch 16")
    assert line == "1.50x faster than your configuration (one measurement, not confirmed): micro-batch 16"
    assert gain_line(1.5) == "1.50x faster than your configuration (one measurement, not confirmed)"


def test_a_sentence_spells_out_what_decides_a_candidate() -> None:
    knobs = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True}}
    candidate = Candidate(knobs=knobs, micro_batch_size=24, gradient_accumulation_steps=2)
    assert name_of(candidate) == "ZeRO 2, optimizer offload, micro-batch 24, accumulation 2"
    assert name_of(Candidate(micro_batch_size=4)) == "micro-batch 4"


def test_an_answer_names_its_layout() -> None:
    knobs = {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}}
    assert name_of(Candidate(knobs=knobs, micro_batch_size=8)) == "ZeRO 1, tensor-parallel groups of 2, micro-batch 8"
    knobs = {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 1}}
    assert name_of(Candidate(knobs=knobs, micro_batch_size=4)) == "ZeRO 1, no tensor-parallel groups, micro-batch 4"
