"""A table of one stage without knobs and one with a knob, whose figures are by hand."""

from benchmarks.replay.recorded import RecordedTable, TableHead, TableRow, key_of
from zerotune.trial_lib.messages.measurement import Memory, ModelProfile
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.result import Outcome

HEAD = TableHead(
    name="small",
    entrypoint=[],
    base_config={
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "train_batch_size": 16,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 5000},
    },
    slots=2,
    device="cpu",
    memory_limit=1000,
    profile=ModelProfile(
        num_params=10,
        trainable_num_params=10,
        activation_mem_per_gpu=10,
        gpu_mem=1000,
        data_parallel_size=2,
        flops_per_sample=100.0,
    ),
)
PLAIN = {"zero_optimization": {"stage": 0}}
SMALL_BUCKET = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 1000}}
LARGE_BUCKET = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 8000}}
PHASES = {"start": 1.0, "import": 2.0, "initialize": 3.0, "first_step": 4.0, "steps": 5.0, "end": 6.0}


def candidate(knobs, size):
    return Candidate(knobs=knobs, micro_batch_size=size, gradient_accumulation_steps=1, slots=2, data_parallel_size=2)


def ran(knobs, size, throughput, need, repeat=0):
    """A row that completed; `throughput` by CPU time, twice that of the wall clock."""
    return TableRow(
        candidate=candidate(knobs, size),
        repeat=repeat,
        outcome=Outcome.COMPLETED,
        metrics={"throughput": throughput / 2, "latency": 4 * size / throughput, "cpu_time_per_sample": 2 / throughput},
        step_times=[1.0, 1.0, 4.0],
        losses=[],
        memory=Memory(peak=[200 + need, 190 + need], after_initialize=[200, 200], available=[300, 310]),
        phases=PHASES,
    )


def failed(knobs, size, repeat=0):
    phases = {"start": 1.0, "import": 2.0, "initialize": 3.0, "end": 1.0}
    return TableRow(
        candidate=candidate(knobs, size),
        repeat=repeat,
        outcome=Outcome.OUT_OF_MEMORY,
        metrics={},
        step_times=[],
        losses=[],
        memory=Memory(),
        phases=phases,
    )


def table(*rows):
    recorded = RecordedTable(HEAD)
    for row in rows:
        recorded.rows.setdefault(key_of(row.candidate), []).append(row)
    return recorded


def small_table():
    return table(
        ran(PLAIN, 4, 100.0, 100),
        ran(PLAIN, 4, 100.0, 100, repeat=1),
        ran(PLAIN, 8, 200.0, 200),
        failed(PLAIN, 16),
        ran(SMALL_BUCKET, 4, 80.0, 80),
        ran(SMALL_BUCKET, 8, 120.0, 160),
        ran(SMALL_BUCKET, 16, 160.0, 290),
        ran(LARGE_BUCKET, 4, 80.0, 180),
        ran(LARGE_BUCKET, 8, 100.0, 280),
        failed(LARGE_BUCKET, 8, repeat=1),
        failed(LARGE_BUCKET, 16),
    )


def steady(knobs, size, throughput, steps=8):
    """A row that completed, whose steps take nearly the same time."""
    row = ran(knobs, size, throughput, 1)
    seconds = row.metrics["latency"]
    return row.model_copy(update={"step_times": [seconds * (1 + 0.001 * place) for place in range(steps)]})
