from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from synthetic import DEVICE, EXACT, TWO, carried, moving, product, run_of

from zerotune.trial_lib.messages.foreseen_run import OPERATIONS, ForeseenRun, Operation
from zerotune.trial_lib.plan.devices import (
    Cluster,
    Constant,
    Efficiencies,
    attention_share,
    host_seconds,
    kernel_seconds,
    known_devices,
)
from zerotune.trial_lib.plan.step_time import PARTS, planned_step


def parts_of(run: ForeseenRun, constants: Efficiencies = EXACT) -> dict[str, float]:
    """The parts that are no rounding errors, to the millisecond."""
    step = planned_step(run, TWO, constants)
    assert tuple(step.parts) == PARTS
    assert sum(step.parts.values()) == pytest.approx(step.seconds)
    return {name: round(part, 3) for name, part in step.parts.items() if part > 1e-3}


def zero(stage: int, **settings: Any) -> dict[str, Any]:
    return {"stage": stage, "ds_config": {"zero_optimization": {"stage": stage, **settings}}}


def test_arithmetic_and_memory_take_the_longer_of_both() -> None:
    run = run_of(("forward", [product(1.0), moving(0.5)]), ("backward", [product(2.0)]), ("update", [moving(0.25)]))
    assert parts_of(run) == {"compute": 3.5, "update": 0.25}


def test_attention_to_all_positions_takes_nearly_twice_as_long_as_causal_attention_with_the_same_model_flops() -> None:
    causal, whole = (product(1.0)._replace(kind=OPERATIONS.index(name)) for name in ("attention", "whole_attention"))
    steps = [planned_step(run_of(("forward", [each]), ("update", [])), TWO, EXACT) for each in (causal, whole)]
    assert steps[1].seconds / steps[0].seconds == pytest.approx(1 / 0.55, rel=1e-4)
    assert steps[0].shares["attention"] == pytest.approx(steps[1].shares["attention"], rel=1e-3)
    # The same model FLOPs in more time.
    assert (steps[0].mfu or 0.0) / (steps[1].mfu or 1.0) == pytest.approx(1 / 0.55, rel=1e-4)


@pytest.mark.parametrize(
    ("overlaps", "waited"),
    [(False, 4.0), (True, 2.0)],
)
def test_a_reduction_hides_behind_the_backward_pass(overlaps: bool, waited: float) -> None:
    """Two buckets of 2 s: the second begins when the first is done and ends 2 s after the pass."""
    backward = [product(1.0), carried(2.0, "all_reduce"), product(2.0), carried(2.0, "all_reduce")]
    run = run_of(("forward", [product(1.0)]), ("backward", backward), ("update", []), **zero(2, overlap_comm=overlaps))
    assert parts_of(run) == {"compute": 4.0, "reducing": waited}


def test_a_third_bucket_waits_for_the_first() -> None:
    """Without a bucket to fill the pass stands still: 1 + 3 s, not 1 + 3 x 1 s of work behind 9 s of links."""
    backward = [each for _ in range(3) for each in (product(1.0), carried(3.0, "all_reduce"))]
    run = run_of(("backward", backward), ("update", []), **zero(2, overlap_comm=True))
    assert parts_of(run) == {"compute": 3.0, "reducing": 7.0}


@pytest.mark.parametrize(
    ("prefetched", "waited"),
    [(0, 2.0), (2e9, 1.0)],
)
def test_gathers_ahead_hide_behind_the_forward_pass(prefetched: float, waited: float) -> None:
    """The third is issued while the device works. The second hides only if it is for later."""
    forward = [
        *(carried(1.0, "all_gather"), carried(1.0, "all_gather"), product(1.0)),
        *(carried(1.0, "all_gather"), product(1.0), product(1.0)),
    ]
    run = run_of(("forward", forward), **zero(3, stage3_prefetch_bucket_size=prefetched / 2))
    assert parts_of(run) == {"compute": 3.0, "gathering": waited}


def test_updated_parameters_are_gathered_in_the_open() -> None:
    run = run_of(("backward", [product(1.0)]), ("update", [moving(0.5), carried(2.0, "all_gather")]), **zero(1))
    assert parts_of(run) == {"compute": 1.0, "update": 0.5, "gathering": 2.0}


def test_tensor_parallelism_waits_for_its_activations() -> None:
    run = run_of(("forward", [product(1.0), carried(0.5, "all_reduce"), product(1.0)]), replicas=1)
    assert parts_of(run) == {"compute": 2.0, "exchanging": 0.5}


@pytest.mark.parametrize("micro_batches", [1, 2, 6])
def test_the_first_stage_of_a_pipeline_waits_a_micro_batch_for_each_other_stage(micro_batches: int) -> None:
    """A run shows two micro-batches of 3 s, or the one that there is."""
    shown = range(min(2, micro_batches))
    passes = ("forward", [product(1.0)]), ("backward", [product(2.0)])
    stretches = *(each for _ in shown for each in passes), ("update", [moving(0.5)])
    numbers = [*(number for number in shown for _ in passes), shown[-1]]
    of_pipeline = {"is_pipeline": True, "pipeline_stages": 4, "accumulation": micro_batches}
    run = run_of(*stretches, micro_batches=numbers, **of_pipeline)
    assert parts_of(run) == {"compute": 3.0 * micro_batches, "exchanging": 9.0, "update": 0.5}


def test_what_other_stages_do_meanwhile_is_decided_by_what_decides_the_ranks_own_passes() -> None:
    slow = Efficiencies(**{**vars(EXACT), "launch": Constant(0.1, 0.1)})
    run = run_of(("backward", [moving(0.02) for _ in range(10)]), ("update", [carried(0.5, "all_gather")]))
    alone, of_two = (planned_step(replace(run, pipeline_stages=each), TWO, slow) for each in (1, 2))
    # The second stage computes for 0.2 of 1.0 s, and waits for its host in the other 0.8. None waits for the update.
    assert of_two.seconds - alone.seconds == pytest.approx(of_two.parts["exchanging"]) == pytest.approx(1.02, abs=0.01)
    launched = [step.shares["launch"] * step.seconds for step in (alone, of_two)]
    assert launched[1] - launched[0] == pytest.approx(0.82, abs=0.01)


OFFLOADED = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"overlap_comm": True}, {"compute": 3.0, "host_update": 1.0, "transfers": 1.0}),
        ({"overlap_comm": False}, {"compute": 3.0, "host_update": 1.0, "transfers": 2.0}),
    ],
)
def test_an_offloaded_optimizer_waits_for_its_gradients(
    settings: Mapping[str, Any], expected: dict[str, float]
) -> None:
    backward = [product(1.0), moving(1.0, "to_host"), product(2.0)]
    update = [moving(2.0, "update", on_host=1), moving(1.0, "to_device")]
    run = run_of(("backward", backward), ("update", update), **zero(2, **OFFLOADED, **settings))
    assert parts_of(run) == expected


def test_a_copy_that_changes_the_format_is_never_of_locked_pages() -> None:
    """Parameters that are offloaded without the optimizer (measured 3.43 s, once foreseen in 0.30 s)."""
    sent = moving(1.0, "to_host")
    settings = zero(3, **OFFLOADED)
    locked, plain = (
        parts_of(run_of(("update", [each, moving(2.0, "copy", on_host=1)]), **settings))
        for each in (sent, sent._replace(flops=1.0))
    )
    assert (locked["transfers"], locked["host_update"]) == (1.0, 1.0)
    assert plain["transfers"] > 3 * locked["transfers"]


def test_a_rank_that_is_alone_updates_with_all_cores_of_its_host() -> None:
    one = moving(148.0, "update", on_host=1)
    device = known_devices()["h200-141gb"]
    alone, among = (host_seconds(one, Cluster(device=device, per_host=per_host), Efficiencies()) for per_host in (1, 8))
    # 14 threads of 4.6 GB/s, and the share of its bandwidth that the public rows say.
    assert alone == pytest.approx(148 / (14 * 4.6), rel=0.01)
    assert among == pytest.approx(148 / (Efficiencies().host_update.value * 77), rel=0.01)


def causal_attention(positions: float) -> Operation:
    # In 16 bits, forward: 4 FLOPs for each pair of positions and number, 8 bytes for each position and number.
    return Operation(OPERATIONS.index("attention"), 0, 1e15, 2e15 / positions)


@pytest.mark.parametrize(
    ("device", "torch", "share"),
    [
        ("a100-80gb", "2.1.2", 0.59),
        ("a100-80gb", "2.12.0+cu130", 1.19),
        ("h100-80gb", "2.10.0", 0.61),
        ("h100-80gb", "2.11.0+cu130", 0.98),
        ("b200-180gb", "", 0.98),
        ("rtx5090-32gb", "", 0.61),
        ("v100-32gb", "", 0.4),
        ("mi300x-192gb", "2.11", 0.42),
    ],
)
def test_a_device_and_its_torch_decide_the_kernel_of_attention(device: str, torch: str, share: float) -> None:
    figures = known_devices()[device]
    assert attention_share(figures, torch) == share
    run = run_of(("forward", [causal_attention(1e6)]), ("update", []), versions={"torch": torch} if torch else {})
    took = planned_step(run, Cluster(device=figures), Efficiencies()).parts["compute"]
    assert 1e15 / took / figures.peak("bfloat16") == pytest.approx(Efficiencies().attention.value * share, rel=0.01)


def test_attention_of_few_positions_is_slower() -> None:
    """4,096 positions on an H200 with torch 2.11 took 0.256 and 0.759 ms (benchmarks/results/gpu_h200_rates.json)."""
    device, kernels = known_devices()["h200-141gb"], Efficiencies(attention=Constant(1.0, 0.1))
    seconds = {
        positions: kernel_seconds(causal_attention(positions), "bfloat16", device, kernels, "2.11")
        for positions in (300, 4096, 1e9)
    }
    assert seconds[300] == pytest.approx(2 * seconds[1e9], rel=0.01)
    flops = 4 * 2 * 16 * 4096**2 * 128 * 3.5
    assert flops / 1e15 * seconds[4096] == pytest.approx(0.256e-3 + 0.759e-3, rel=0.07)


def waits_for(kind: str) -> Operation:
    return moving(0.0, kind)


def test_an_update_on_nvme_waits_for_its_states_which_are_written_at_half_the_speed() -> None:
    read, written = ([moving(1.0, kind), waits_for(kind)] for kind in ("from_disk", "to_disk"))
    run = run_of(("backward", [product(1.0)]), ("update", [*read, moving(2.0, "update", on_host=1), *written]))
    assert parts_of(run) == {"compute": 1.0, "host_update": 1.0, "disk": 3.0}


def test_what_is_read_ahead_and_written_behind_hides_behind_other_work() -> None:
    ahead = [moving(1.0, "from_disk"), moving(0.5, "to_disk"), product(3.0)]
    assert parts_of(run_of(("backward", [*ahead, waits_for("from_disk"), waits_for("to_disk")]))) == {"compute": 3.0}
    # A step ends with what it has begun.
    assert parts_of(run_of(("backward", [product(1.0), moving(1.0, "to_disk")]))) == {"compute": 1.0, "disk": 1.0}


def test_a_slower_disk_makes_a_step_less_certain() -> None:
    run = run_of(("backward", [product(1.0)]), ("update", [moving(9.0, "from_disk"), waits_for("from_disk")]))
    step = planned_step(run, TWO, EXACT)
    assert step.bound == "disk"
    assert step.shares["disk"] == pytest.approx(0.9)


def test_small_operations_wait_for_the_host() -> None:
    slow = Efficiencies(**{**vars(EXACT), "launch": Constant(0.1, 0.1)})
    run = run_of(("forward", [moving(0.02) for _ in range(10)]))
    assert parts_of(run, slow) == {"compute": 0.2, "launches": pytest.approx(0.82)}


def test_a_batch_is_fetched_while_the_device_still_works() -> None:
    """The first of a step has nothing to hide behind."""
    stretches = [(name, [product(1.0)] if name != "load" else []) for _ in range(2) for name in ("load", "forward")]
    run = run_of(*stretches, micro_batches=(0, 0, 1, 1), loading_s=(0.6, 0.6), accumulation=2)
    assert parts_of(run) == {"compute": 2.0, "data": 0.6}


@pytest.mark.parametrize(("loading", "waits"), [(0.6, 0.0), (1.5, 1.0)])
def test_what_workers_load_is_waited_for_only_where_it_takes_longer_than_the_step(loading: float, waits: float) -> None:
    stretches = [(name, [product(1.0)] if name != "load" else []) for _ in range(2) for name in ("load", "forward")]
    run = run_of(*stretches, micro_batches=(0, 0, 1, 1), loading_s=(loading,), loads_beside=True, accumulation=2)
    assert planned_step(run, Cluster(device=DEVICE), EXACT).parts["data"] == pytest.approx(waits, abs=1e-4)


def test_micro_batches_that_the_run_leaves_out_are_counted() -> None:
    stretches = [("forward", [product(1.0)]), ("forward", [product(1.0), carried(0.5, "all_reduce")]), ("update", [])]
    run = run_of(*stretches, micro_batches=(0, 1, 1), accumulation=4, micro_batch=3, tokens=10)
    step = planned_step(run, TWO, EXACT)
    assert step.seconds == pytest.approx(4.5, rel=1e-3)
    assert step.samples_per_s == pytest.approx(4 * 3 * 2 / 4.5, rel=1e-3)
    assert step.tokens_per_s == pytest.approx(10 * step.samples_per_s)
    assert step.mfu == pytest.approx(4 / 4.5, rel=1e-3)
    assert step.bound == "compute"


def test_stage_3_surrounds_each_module_with_hooks() -> None:
    """Four modules forward, and four backward, which the log does not name. Some hooks hide behind 0.05 s of work."""
    slow = Efficiencies(**{**vars(EXACT), "module": Constant(0.1, 0.1)})
    forward = [moving(0.01)._replace(where=index) for index in range(5)]
    stretches = [("forward", forward), ("backward", [moving(0.01)]), ("update", [])]
    assert parts_of(run_of(*stretches, **zero(3)), slow)["launches"] == pytest.approx(0.75, abs=0.01)
    assert "launches" not in parts_of(run_of(*stretches, **zero(2)), slow)


@pytest.mark.parametrize("accumulation", [3, 6, 40])
def test_many_micro_batches_are_not_laid_one_by_one(accumulation: int) -> None:
    """The sums are those of a run that shows all of them."""
    gathers = [carried(0.7, "all_gather"), product(0.5), carried(0.4, "all_gather"), product(0.25)]
    one: list[tuple[str, Any]] = [("load", []), ("forward", gathers), ("backward", [product(1.0)])]
    settings = {**zero(3), "accumulation": accumulation, "loading_s": (0.3,)}
    ids = [index for index in range(accumulation) for _ in one]
    shown = run_of(*one * accumulation, ("update", []), micro_batches=[*ids, accumulation - 1], **settings)
    short = run_of(*one * 2, ("update", []), micro_batches=[0, 0, 0, 1, 1, 1, 1], **settings)
    assert parts_of(short) == pytest.approx(parts_of(shown))


def test_only_whole_steps_count() -> None:
    run = run_of(("forward", [product(1.0)]), ("update", []))
    unfinished = ForeseenRun.from_json({**run.to_json(), "moments": [*run.moments, (2, 2, 0, 0, 1)]})
    assert planned_step(unfinished, TWO, EXACT).seconds == pytest.approx(1.0, rel=1e-3)
    with pytest.raises(ValueError, match="no optimizer step"):
        planned_step(ForeseenRun(world=2), TWO, EXACT)


def test_the_interval_follows_what_bounds_the_step() -> None:
    """A constant that decides nothing widens nothing."""
    unsure = Efficiencies(**{**vars(EXACT), "network": Constant(1.0, 2.0), "matmul": Constant(1.0, 0.5)})
    products = run_of(("forward", [product(1.0)]))
    step, sure = planned_step(products, TWO, unsure), planned_step(products, TWO, EXACT)
    assert step.low < sure.low < sure.seconds < sure.high < step.high
    assert step.high / step.seconds == pytest.approx(step.seconds / step.low)
    moved = run_of(("forward", [moving(1.0)]))
    assert planned_step(moved, TWO, unsure).high == pytest.approx(planned_step(moved, TWO, EXACT).high, rel=1e-3)


def test_under_autocast_the_share_of_the_peak_is_that_of_the_format_of_the_products() -> None:
    """Parameters of 32 bits, products in 16, and one product that stays in 32."""
    device = replace(DEVICE, peaks={"float32": 1e12, "bfloat16": 4e12, "tf32": 2e12})
    products = [product(1.0)._replace(dtype=1), product(0.25)]
    fields = {"dtypes": ("float32", "bfloat16", "tf32"), "formats": ("bfloat16", "float32")}
    step = planned_step(run_of(("forward", products), ("update", []), **fields), replace(TWO, device=device), EXACT)
    # A quarter of a second for each of both.
    assert step.seconds == pytest.approx(0.5, rel=1e-3)
    assert step.mfu == pytest.approx(1.25 / 0.5 / 4, rel=1e-3)


def test_tf32_counts_by_its_own_peak() -> None:
    device = replace(DEVICE, peaks={"float32": 1e12, "tf32": 8e12})
    run = run_of(("forward", [product(1.0)]), ("update", []), dtypes=("tf32",), formats=("tf32",))
    step = planned_step(run, replace(TWO, device=device), EXACT)
    assert (step.seconds, step.mfu) == pytest.approx((0.125, 1.0), rel=1e-3)


@pytest.mark.parametrize("training", [1, 2, 4])
def test_a_device_that_trains_alone_has_its_share_of_the_host_and_no_more(training: int) -> None:
    device = replace(DEVICE, per_host=4)
    update = [moving(1.0, "update", on_host=1)]
    run = run_of(("forward", [product(1.0)]), ("update", update), world=training, replicas=training)
    step = planned_step(run, Cluster(device=device, per_host=training), EXACT)
    assert step.parts["host_update"] == pytest.approx(0.5)
