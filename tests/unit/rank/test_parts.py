"""The parts of a traced step: they add up to it, and what hides something else counts."""

import pytest

from zerotune.trial_lib.messages.measurement import STEP_PARTS, TracedStep
from zerotune.trial_lib.rank.step_trace import (
    BOUNDARY,
    PREFIX,
    WAIT,
    Span,
    TraceEvent,
    collective_part,
    parts_of,
    window_of,
)

S = 1_000_000_000


def found(*spans: Span, end: int = 10 * S) -> dict[str, float]:
    parts = parts_of(spans, 0, end)
    assert sum(parts.values()) == pytest.approx(end / S)
    return {part: seconds for part, seconds in parts.items() if seconds}


def test_on_a_cpu_a_wait_within_the_forward_pass_is_no_computation():
    assert found(Span(S, 8 * S, "compute"), Span(2 * S, 5 * S, "gathering")) == {
        "other": 3,
        "compute": 4,
        "gathering": 3,
    }


def test_time_without_any_span_is_other():
    assert found() == {"other": 10}


def test_spans_outside_the_window_do_not_count():
    assert found(Span(-5 * S, -S, "data"), Span(-S, 2 * S, "data"), Span(11 * S, 12 * S, "data")) == {
        "data": 2,
        "other": 8,
    }


def test_on_a_gpu_computation_hides_transfers_between_devices():
    spans = (
        Span(0, 10 * S, "compute"),
        Span(S, 4 * S, "compute", on_device=True),
        Span(3 * S, 6 * S, "gathering", on_device=True),
        Span(6 * S, 7 * S, "reducing", on_device=True),
    )
    assert found(*spans) == {"compute": 3, "gathering": 2, "reducing": 1, "launches": 4}


def test_an_idle_gpu_waits_for_what_its_host_does():
    spans = (
        Span(0, S, "compute", on_device=True),
        Span(0, 3 * S, "data"),
        Span(3 * S, 7 * S, "host_update"),
        Span(7 * S, 8 * S, "update"),
        Span(8 * S, 9 * S, "transfers", on_device=True),
    )
    assert found(*spans) == {"compute": 1, "data": 2, "host_update": 4, "launches": 1, "transfers": 1, "other": 1}


def test_every_part_of_a_span_has_a_place():
    for part in set(STEP_PARTS) - {"launches", "other", "transfers"}:
        assert found(Span(0, 10 * S, part)) == {part: 10}


def end_of_step(at: int) -> TraceEvent:
    return TraceEvent(PREFIX + BOUNDARY, at, at, thread=1, is_annotation=True)


def events_to_parts(*events: TraceEvent, left_out: int = 0) -> dict[str, float]:
    window = window_of(events, left_out)
    parts = parts_of(window.spans, window.start, window.end)
    return {part: seconds for part, seconds in parts.items() if seconds}


def test_a_wait_belongs_to_the_collective_that_its_thread_began_last():
    assert events_to_parts(
        end_of_step(0),
        TraceEvent("c10d::_allgather_base_", S, 2 * S, thread=1),
        TraceEvent(PREFIX + WAIT, 2 * S, 4 * S, thread=1, is_annotation=True),
        TraceEvent("c10d::allreduce_", 5 * S, 6 * S, thread=1),
        TraceEvent(PREFIX + WAIT, 6 * S, 9 * S, thread=1, is_annotation=True),
        TraceEvent("gloo:all_gather", S, 9 * S, thread=2, is_annotation=True),
        end_of_step(10 * S),
    ) == {"gathering": 3, "reducing": 4, "other": 3}


def test_a_sum_within_the_forward_pass_exchanges_activations():
    assert events_to_parts(
        end_of_step(0),
        TraceEvent(f"{PREFIX}compute.forward", 0, 5 * S, thread=1, is_annotation=True),
        TraceEvent("c10d::allreduce_", S, 3 * S, thread=1),
        TraceEvent("c10d::allreduce_", 6 * S, 7 * S, thread=1),
        end_of_step(10 * S),
    ) == {"compute": 3, "exchanging": 2, "reducing": 1, "other": 4}


def test_what_the_model_gathers_by_itself_is_no_parameter():
    negatives = TraceEvent("c10d::allgather_", 2 * S, 4 * S, thread=1)
    fetch = TraceEvent(f"{PREFIX}gathering", S, 3 * S, thread=1, is_annotation=True)
    passes = (
        TraceEvent(f"{PREFIX}compute.forward", 0, 5 * S, thread=1, is_annotation=True),
        TraceEvent(f"{PREFIX}compute.backward", 5 * S, 8 * S, thread=1, is_annotation=True),
    )
    recomputed = TraceEvent("c10d::allgather_", 6 * S, 7 * S, thread=1)
    in_the_step = TraceEvent("c10d::_allgather_base_", 8 * S, 9 * S, thread=1)
    assert events_to_parts(end_of_step(0), *passes, negatives, recomputed, in_the_step, end_of_step(10 * S)) == {
        **{"compute": 5, "exchanging": 3, "gathering": 1, "other": 1},
    }
    of_stage_3 = events_to_parts(end_of_step(0), *passes, fetch, negatives, end_of_step(10 * S))
    assert of_stage_3 == {"compute": 5, "gathering": 3, "other": 2}


def test_on_a_gpu_too():
    forward = TraceEvent(f"{PREFIX}compute.forward", 0, 5 * S, thread=1, is_annotation=True)
    issued = [TraceEvent("c10d::allreduce_", at * S, at * S + 1, thread=1, number=at) for at in (1, 6)]
    kernels = [
        TraceEvent("ncclDevKernel_AllReduce", at * S, (at + 2) * S, on_device=True, issued_by=at) for at in (1, 6)
    ]
    parts = events_to_parts(end_of_step(0), forward, *issued, *kernels, end_of_step(10 * S))
    assert (parts["exchanging"], parts["reducing"]) == (2, 2)


def test_parameters_are_fetched_for_the_backward_pass_in_a_thread_of_autograd():
    events = (
        TraceEvent(f"{PREFIX}compute.backward", 0, 8 * S, thread=1, is_annotation=True),
        TraceEvent(f"{PREFIX}gathering", S, 3 * S, thread=2, is_annotation=True),
        TraceEvent("c10d::_allgather_base_", 2 * S, 2 * S + 1, thread=2, number=7),
        TraceEvent("ncclDevKernel_AllGather", 2 * S, 5 * S, on_device=True, issued_by=7),
    )
    assert events_to_parts(end_of_step(0), *events, end_of_step(10 * S))["gathering"] == 3


def test_steps_at_the_beginning_are_left_out():
    slow = TraceEvent("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", S, 4 * S, thread=1)
    assert events_to_parts(end_of_step(0), slow, end_of_step(5 * S), end_of_step(6 * S), left_out=1) == {"other": 1}


def test_kernels_that_the_optimizer_issued_are_its_update():
    assert events_to_parts(
        end_of_step(0),
        TraceEvent("aten::mm", 0, S, thread=1, number=7),
        TraceEvent(f"{PREFIX}update", 2 * S, 3 * S, thread=1, is_annotation=True),
        TraceEvent("aten::_fused_adam_", 2 * S, 3 * S, thread=1, number=8),
        TraceEvent("gemm", S, 4 * S, on_device=True, issued_by=7),
        TraceEvent("adam", 4 * S, 6 * S, on_device=True, issued_by=8),
        TraceEvent("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage)", 5 * S, 8 * S, on_device=True),
        TraceEvent(f"{PREFIX}update", 4 * S, 9 * S, on_device=True, is_annotation=True),
        end_of_step(10 * S),
    ) == {"compute": 3, "update": 2, "gathering": 2, "launches": 1, "other": 2}


def test_generation_and_rewards_are_whole_whatever_they_do_within():
    scopes = {"generation": (S, 5 * S), "rewards": (5 * S, 7 * S)}
    on_host = [
        TraceEvent(f"{PREFIX}{part}", start, end, thread=1, is_annotation=True) for part, (start, end) in scopes.items()
    ]
    work = (
        TraceEvent("aten::mm", 2 * S, 3 * S, thread=1, number=7),
        TraceEvent("c10d::_allgather_base_", 3 * S, 4 * S, thread=1),
        TraceEvent("aten::mm", 7 * S, 9 * S, thread=1, number=8),
    )
    cpu = {"generation": 4, "rewards": 2, "compute": 2, "other": 2}
    assert events_to_parts(end_of_step(0), *on_host, *work, end_of_step(10 * S)) == cpu
    kernels = (
        TraceEvent("gemm", 2 * S, 3 * S, on_device=True, issued_by=7),
        TraceEvent("gemm", 8 * S, 9 * S, on_device=True, issued_by=8),
    )
    gpu = {"generation": 4, "rewards": 2, "compute": 1, "launches": 1, "other": 2}
    assert events_to_parts(end_of_step(0), *on_host, *work, *kernels, end_of_step(10 * S)) == gpu


def test_a_trace_without_a_step_is_refused():
    with pytest.raises(ValueError, match="no complete step"):
        window_of([end_of_step(0)], 0)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("c10d::_reduce_scatter_base_", "reducing"),
        ("c10d::allreduce_coalesced_", "reducing"),
        ("ncclKernel_ReduceScatter_RING_LL_Sum_half", "reducing"),
        ("c10d::broadcast_", "gathering"),
        ("c10d::alltoall_base_", "exchanging"),
        ("ncclDevKernel_SendRecv", "exchanging"),
    ],
)
def test_collectives_are_known_by_their_names(name, part):
    assert collective_part(name) == part


def test_shares_are_in_one_order_and_leave_out_what_is_nothing():
    step = TracedStep(seconds=2.0, parts={"data": 1.5, "compute": 0.5, "update": 0.0}, steps=1)
    assert list(step.shares.items()) == [("compute", 0.25), ("data", 0.75)]
    assert TracedStep(failure="no profiler").shares == {}
