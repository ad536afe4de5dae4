"""Grids of real launches as worlds, and the plan that a search begins with there."""

from collections import Counter

import numpy as np
import pytest

from benchmarks.replay.grids import GRIDS, GridWorld, by_adaptive, figures_of, read_worlds, told_apart
from benchmarks.replay.megatron import Launch
from zerotune.trial_lib.plan import laid_out
from zerotune.trial_lib.records.result import Outcome
from zerotune.trial_lib.search.base import key_of, planned_costs

MODEL = {
    **{"source": "a test", "framework": "a test", "model": "Small", "params": 1_342_177_280, "layers": 16},
    **{"hidden": 2048, "heads": 32, "kv_heads": 32, "ffn": 8192, "vocab": 131_072, "seq_len": 4096},
    **{"precision": "bf16, fp32 gradient accumulation", "gpus": 8, "gpus_per_node": 8, "gpu_kind": "H100-80GB"},
    **{"gpu_memory_gib": 80, "activation_checkpointing": False, "megatron_sequence_parallel": True},
}


def launch(stage=1, tensor=1, pipeline=1, size=1, **more):
    replicas = 8 // tensor // pipeline
    layout = {"zero_stage": stage, "tensor_parallel": tensor, "pipeline_parallel": pipeline, "micro_batch": size}
    return {**MODEL, **layout, "grad_accum": 256 // (replicas * size), "outcome": "completed", **more}


def grid():
    """Returns launches of which those with more than four samples at a time failed; two tensor ranks are fastest."""
    rows = []
    for tensor in (1, 2, 4):
        for size in (1, 2, 4, 32):
            ran = {"samples_per_s": {1: 50.0, 2: 70.0, 4: 40.0}[tensor] * size / (size + 1)}
            rows.append(launch(tensor=tensor, size=size, **(ran if size <= 4 else {"outcome": "out_of_memory"})))
    return rows


def test_the_recorded_worlds_have_failures_and_a_best_launch_each():
    worlds = read_worlds(GRIDS)
    assert Counter(key[0].split(" (")[0] for key in worlds) == {"Llama 8B": 7, "Llama 1B": 7, "LLaMA-13B": 4}
    rows = next(iter(worlds.values()))
    world = GridWorld(rows, is_planned=False)
    assert len(world.launches) == len(rows)
    assert world.best == max(world.speed(place) or 0.0 for place in world.launches)


def test_a_launch_ends_as_it_did_and_nothing_else_is_asked_for():
    world = GridWorld(grid())
    order = by_adaptive(world, 12)
    assert set(order) <= set(world.launches)
    assert len({world.speed(place) for place in order}) > 2
    candidate = world.candidate(world.problem.space.arms[0].knobs, 32)
    assert world.run(candidate, None).outcome is Outcome.OUT_OF_MEMORY
    figures = figures_of(world, [order])
    assert figures["regret"]["10"] == 0.0


def test_a_launch_that_may_not_fit_is_made_once_safer_ones_have_little_to_gain(monkeypatch):
    # With what the allocator cannot use, the plan says that the fastest launch there does not fit.
    monkeypatch.setattr(laid_out, "_PIECES", 1.0)
    rows = read_worlds(GRIDS)["LLaMA-13B (128k vocabulary)", 32, 2048, 2048]
    world = GridWorld(rows)
    figures = figures_of(world, [by_adaptive(world, 10)])
    assert figures["regret"]["10"] <= 0.03
    assert figures["failed"]["10"] <= 0.2


def test_even_odds_are_risked_once_the_launches_before_have_earned_it():
    world = GridWorld(read_worlds(GRIDS)["LLaMA-13B (128k vocabulary)", 32, 2048, 2048])
    order = by_adaptive(world, 20)
    risked = [place for place, launch in enumerate(order) if world.chance(launch) < 0.6]
    assert order[risked[0]] == max(world.launches, key=lambda launch: world.speed(launch) or 0.0)
    # One in twenty may fail.
    assert risked[0] >= 10


def test_a_plan_has_the_speed_of_each_launch():
    world = GridWorld(grid())
    arms, base = world.problem.space.arms, world.problem.base_config
    planned = world.problem.expected
    assert [arm.key for arm in planned] == [key_of(arm, base, world.problem.space.coarse_switches) for arm in arms]
    assert len({arm.key for arm in planned}) == 3
    for place, costs in planned_costs(arms, base, planned).items():
        speeds = [world.launches[place, size].samples_per_s for size in costs.sizes]
        assert np.exp(costs.costs) * speeds == pytest.approx(1.0)


def test_what_divides_a_model_divides_its_bytes():
    whole, tensor, sharded = (
        Launch(launch(**layout)) for layout in ({"stage": 0}, {"stage": 0, "tensor": 2}, {"stage": 1})
    )
    assert tensor.states == pytest.approx(whole.states / 2)
    assert tensor.activations == pytest.approx(whole.activations / 2)
    assert sharded.states < 0.6 * whole.states
    # The first stage of a pipeline keeps as many micro-batches as there are stages.
    assert Launch(launch(pipeline=4)).activations > 0.5 * Launch(launch()).activations
    recomputed = Launch(launch(activation_checkpointing=True))
    assert recomputed.activations < 0.5 * Launch(launch()).activations


def test_more_parallelism_than_the_work_needs_is_foreseen_slower():
    speeds = [Launch(launch(tensor=tensor, size=2)).samples_per_s for tensor in (1, 2, 4, 8)]
    assert speeds == sorted(speeds, reverse=True)
    few, many = (Launch(launch(pipeline=4, size=size)).samples_per_s for size in (64, 4))
    assert few < many  # a pipeline of few micro-batches waits while it fills


def layers_of(**row):
    return [list(parts).count("layer") for parts in Launch(launch(**row)).by_stage]


def test_a_framework_divides_a_model_into_stages_as_its_code_does():
    """In nanotron a large vocabulary counts as four layers, and in Aleph Alpha's code the embedding as one."""
    assert layers_of(pipeline=4, framework="nanotron") == [6, 5, 5, 0]
    assert layers_of(pipeline=4, framework="AA-Scaling") == [4, 5, 5, 2]
    assert layers_of(pipeline=4) == [4, 4, 4, 4]
    assert Launch(launch(pipeline=4, size=64, framework="nanotron")).is_possible is False  # two micro-batches
    assert Launch(launch(pipeline=8, framework="nanotron")).is_possible


def test_a_stage_without_a_part_of_the_model_cannot_run():
    """So ended all but one of the recorded launches of that kind."""
    rows = [row for rows in read_worlds(GRIDS).values() for row in rows if "nanotron" in row["framework"]]
    empty = [row for row in rows if not all(Launch(row).by_stage)]
    assert len(empty) > 100
    assert sum(row["outcome"] == "completed" for row in empty) <= 1


def test_whole_logits_need_memory_that_tensor_parallelism_does_not_divide():
    gathered, divided = (
        Launch(launch(tensor=4, size=8, framework=framework)).activations for framework in ("AA-Scaling", "nanotron")
    )
    logits = 14 * 8 * 4096 * 131_072
    assert divided < logits < gathered


def test_failures_are_told_apart():
    failed = {"outcome": "out_of_memory"}
    rows = [
        launch(size=4, framework="nanotron"),
        launch(size=2, framework="nanotron", **failed),
        launch(size=8, framework="nanotron", **failed),
        launch(size=64, pipeline=8, framework="nanotron", **failed),
    ]
    found = told_apart(rows)
    assert (found["not of memory"], found["perhaps of memory"]) == (1, 1)
    assert found["of code"] == 1
