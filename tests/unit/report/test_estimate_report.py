from dataclasses import replace
from pathlib import Path

from zerotune.trial_lib.messages.measurement import Memory, ModelProfile, ProgramProfile
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.report.estimate_report import estimate_report
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.known_trials import KnownTrials
from zerotune.trial_lib.study.program import completed_config

MIB = 2**20
PROFILE = ModelProfile(
    num_params=10_000_000,
    trainable_num_params=10_000_000,
    activation_mem_per_gpu=4 * MIB,
    gpu_mem=1000 * MIB,
    data_parallel_size=2,
    flops_per_sample=1e9,
)
BASE = {"train_micro_batch_size_per_gpu": 6, "zero_optimization": {"stage": 1, "reduce_bucket_size": 1_000_000}}


def result(outcome=Outcome.COMPLETED, above=0, purpose=Purpose.SEARCH):
    memory = Memory()
    if outcome is Outcome.COMPLETED:
        memory = Memory(peak=[above + 300 * MIB], after_initialize=[300 * MIB], available=[900 * MIB])
    return TrialResult(trial_id="s-1", number=1, purpose=purpose, config_hash="0", outcome=outcome, memory=memory)


def known(trials=(), base=BASE, studies=(), **profile):
    own = Candidate(micro_batch_size=1, slots=2)
    return KnownTrials(
        replace(PROFILE, **profile),
        (own, result(above=200 * MIB, purpose=Purpose.PROFILE)),
        base,
        tuple(trials),
        tuple(studies),
    )


def at(size, stage=2, **zero):
    knobs = {"zero_optimization": {"stage": stage, **zero}}
    return Candidate(knobs=knobs, micro_batch_size=size, slots=2, data_parallel_size=2)


def report(trials=(), device="cuda", headroom=0.05, max_micro_batch=None, **changes):
    return estimate_report(known(trials, **changes), 2, device, arguments(headroom, max_micro_batch))


def arguments(headroom=0.05, max_micro_batch=None):
    return StudyArguments(
        command=("python", "train.py"),
        model_dir=Path(),
        free_batch=True,
        memory_headroom=headroom,
        max_micro_batch=max_micro_batch,
    )


def test_there_is_a_row_for_each_stage_and_each_way_of_offloading():
    assert [row.label for row in report().rows] == [
        "z0",
        "z1",
        "z1-offload-optimizer",
        "z2",
        "z2-offload-optimizer",
        "z3",
        "z3-offload-optimizer",
        "z3-offload-optimizer-offload-param",
    ]


def test_what_the_trainer_fills_in_for_auto_is_what_the_table_counts_with():
    """7 B parameters in bf16 over eight GPUs, with buckets that follow from a hidden size of 4096."""
    auto = {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}
    settled = {"bf16": {"enabled": True}, "zero_optimization": {"reduce_bucket_size": 4096**2}}
    base = completed_config(auto, ProgramProfile(settled=settled))
    seven = {"num_params": 7 * 10**9, "trainable_num_params": 7 * 10**9, "gpu_mem": 80 * 2**30}
    model = replace(PROFILE, **seven, data_parallel_size=8)
    own = Candidate(micro_batch_size=1, slots=8)
    trials = KnownTrials(model, (own, result(above=200 * MIB, purpose=Purpose.PROFILE)), base)
    rows = {row.label: row for row in estimate_report(trials, 8, "cuda", arguments()).rows}
    # Parameters whole; gradients, a master copy and Adam's states of an eighth.
    assert rows["z2"].states == 7 * 10**9 * (2 + (2 + 4 + 8) / 8)
    # Beside them 32-bit gradients of an eighth for the update, and no gigabytes of buckets.
    beside = rows["z2"].total - rows["z2"].states
    assert beside < 1.1 * 4 * 7 * 10**9 / 8


def test_on_a_cpu_offload_is_left_out_with_a_word():
    on_cpu = report(device="cpu")
    assert [row.label for row in on_cpu.rows] == ["z0", "z1", "z2", "z3"]
    assert any("saves nothing" in note for note in on_cpu.notes)


def test_a_pipeline_has_rows_of_the_stages_that_deepspeed_runs_it_with():
    pipeline = report(pipeline_parallel=True, data_parallel_size=1)
    assert {row.stage for row in pipeline.rows} == {0, 1}
    assert pipeline.rows[0].states == report().rows[0].states / 2
    assert any("pipeline" in note for note in pipeline.notes)


def test_a_row_without_offload_withdraws_the_users_own():
    own = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    labels = [row.label for row in report(base={**BASE, "zero_optimization": own}).rows]
    assert len(labels) == len(set(labels)) == 8


def test_activations_and_total_are_for_the_users_own_micro_batch():
    table = report()
    assert table.micro_batch_size == 6
    for row in table.rows:
        assert row.activations == 6 * 4 * MIB
        assert row.total_low < row.total < row.total_high
        assert row.total > row.states


def test_where_the_code_decides_on_the_batch_the_table_is_for_one_sample():
    base = {**BASE, "train_micro_batch_size_per_gpu": "auto"}
    assert report(base=base).micro_batch_size == 1


def test_higher_stages_need_less_for_states_and_offload_less_still():
    states = {row.label: row.states for row in report().rows}
    assert states["z0"] > states["z1"] > states["z2"] > states["z3"]
    assert states["z2-offload-optimizer"] < states["z2"]


def test_the_largest_micro_batch_is_bounded_as_asked_and_by_headroom():
    assert all(row.largest_micro_batch <= 8 for row in report(max_micro_batch=8).rows)
    generous, careful = report(headroom=0.0), report(headroom=0.4)
    for more, less in zip(generous.rows, careful.rows, strict=True):
        assert less.largest_micro_batch < more.largest_micro_batch <= more.perhaps_micro_batch


def test_what_was_measured_stands_beside_what_is_predicted_and_narrows_it():
    trials = [(at(size, reduce_bucket_size=10**6), result(above=(150 + 6 * size) * MIB)) for size in (10, 40)]
    failed = (at(200), result(Outcome.OUT_OF_MEMORY))
    before, after = report(), report([*trials, failed])
    row_before, row = (next(row for row in table.rows if row.label == "z2") for table in (before, after))
    assert row.measured is not None
    assert (row.measured.completed, row.measured.largest_micro_batch) == (2, 40)
    assert row.measured.smallest_out_of_memory == 200
    assert row.measured.total is not None
    assert row.measured.total > 390 * MIB
    assert row.total_high - row.total_low < row_before.total_high - row_before.total_low
    assert 40 <= row.largest_micro_batch < 200
    assert next(row for row in after.rows if row.label == "z0").measured is None


def test_it_says_where_its_figures_come_from():
    assert report().studies == []
    assert any("profile trial" in note for note in report().notes)
    assert report([(at(4), result(above=180 * MIB))], studies=["tiny-1"]).studies == ["tiny-1"]


def test_a_log_has_the_model_and_a_line_for_each_arm_and_says_what_bounds_the_sizes():
    lines = report(device="cpu", max_micro_batch=8).lines()
    assert lines[0] == "parameters: 10,000,000, trainable: 10,000,000"
    assert [line.partition(":")[0] for line in lines[2:6]] == ["z0", "z1", "z2", "z3"]
    assert lines[2].endswith(", micro-batch 8 (all)")
    assert lines[6:] == ["Micro-batches above 8 are not considered, because of --max-micro-batch."]
    assert report(num_params=10**12, trainable_num_params=10**12).lines()[2].endswith(", micro-batch none")


def row_of(table, label):
    return next(row for row in table.rows if row.label == label)


def test_what_an_arm_keeps_on_the_host_stands_beside_and_has_to_fit_there():
    table = report(host_mem=10**9)
    assert table.host_memory == 9 * 10**8
    assert row_of(table, "z2").on_host == 0
    offloaded = row_of(table, "z2-offload-optimizer")
    # 32-bit parameters over two ranks: locked blocks of a power of two, two states, and what PyTorch's Adam takes.
    assert offloaded.on_host == 3 * 2**25 + (8 + 8) * 5_000_000
    assert offloaded.largest_micro_batch > 0
    little = row_of(report(host_mem=10**8), "z2-offload-optimizer")
    assert (little.largest_micro_batch, little.perhaps_micro_batch) == (0, 0)
    assert row_of(report(host_mem=10**8), "z2").largest_micro_batch > 0


def test_nobody_knows_of_a_host_whose_memory_was_not_asked_for_and_a_cpu_has_none_apart():
    assert report().host_memory is None
    assert report(host_mem=10**9, device="cpu").host_memory is None


def test_what_ran_out_of_the_hosts_memory_is_told_apart():
    failed = (at(4, offload_optimizer={"device": "cpu"}), result(Outcome.OUT_OF_HOST_MEMORY))
    measured = row_of(report([failed]), "z2-offload-optimizer").measured
    assert measured is not None
    assert (measured.out_of_host_memory, measured.smallest_out_of_memory) == (1, None)
