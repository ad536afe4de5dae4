"""Layouts of a decoder by formulas: which a program can have, what fits, and when formulas do not hold."""

from dataclasses import replace
from typing import Any

import pytest

from zerotune.trial_lib.messages.foreseen_run import ForeseenRun
from zerotune.trial_lib.messages.turned import CHECKPOINTING
from zerotune.trial_lib.plan.devices import Cluster, known_devices
from zerotune.trial_lib.plan.layouts import (
    DecoderShape,
    LaidOutDecoder,
    LayoutChoices,
    beside_runs,
    best_layouts,
    decoder_of,
)
from zerotune.trial_lib.plan.plan_record import PlannedArm, PlannedDevices, PlannedRange
from zerotune.trial_lib.search.arms import RequestedKnob

LLAMA_8B = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocabulary": 128256}
SHAPE = DecoderShape(parameters=8_030_261_248, tokens=4096, **LLAMA_8B)
H100 = known_devices()["h100-80gb"]
EIGHT = Cluster(device=H100, per_host=8)


def _run(**more: Any) -> ForeseenRun:
    program = {"decoder": LLAMA_8B, **more.pop("program", {})}
    given = {"world": 8, "tokens": 4096, "parameters": 8_030_261_248, "trainable": 8_030_261_248, "program": program}
    return ForeseenRun(**{**given, **more})


def test_the_shape_comes_from_the_model_s_own_numbers() -> None:
    assert decoder_of(_run()) == SHAPE
    assert SHAPE.counted_parameters == pytest.approx(SHAPE.parameters, rel=1e-3)


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (_run(program={"decoder": {}}), "has no `config`"),
        (_run(tokens=None), "its samples no tokens"),
        (_run(trainable=20_000_000), "all weights"),
        (_run(parameters=47_000_000_000, trainable=47_000_000_000), "and the model 47,000,000,000"),
    ],
)
def test_other_models_get_no_layouts_but_a_reason(run: ForeseenRun, reason: str) -> None:
    said = decoder_of(run)
    assert isinstance(said, str)
    assert reason in said


def test_a_program_has_the_groups_that_divide_its_heads_and_the_sizes_that_are_requested() -> None:
    plain = LayoutChoices.of(_run(), SHAPE, (), (0, 1, 2, 3))
    assert (plain.tensors, plain.pipelines, plain.checkpointing) == ([1, 2, 4, 8], [1], (False,))
    # ZeRO 3 is that of the foreseen arms.
    assert plain.zero_stages == [0, 1, 2]
    three_heads = replace(SHAPE, heads=9, kv_heads=3)
    assert LayoutChoices.of(_run(), three_heads, (), (1,)).tensors == [1]
    asked = (
        RequestedKnob("program.--stages", (2, 4), layout="pipeline"),
        RequestedKnob("tensor_parallel.autotp_size", (2,)),
    )
    some = LayoutChoices.of(_run(), SHAPE, asked, (1,))
    assert (some.tensors, some.pipelines, some.by_autotp) == ([1, 2], [1, 2, 4], True)
    own = LayoutChoices.of(_run(), SHAPE, (RequestedKnob("program.--tp", (2,), layout="tensor"),), (1,))
    assert not own.by_autotp


def test_checkpointing_is_tried_if_it_can_be_turned_and_stays_if_it_cannot() -> None:
    turnable = _run(program={"turnable": {CHECKPOINTING: ["none", "full"]}})
    assert LayoutChoices.of(turnable, SHAPE, (), (1,)).checkpointing == (False, True)
    by_code = _run(program={"not_turnable": {CHECKPOINTING: "your code recomputes activations by itself"}})
    assert LayoutChoices.of(by_code, SHAPE, (), (1,)).checkpointing == (True,)
    no_layers = _run(program={"not_turnable": {CHECKPOINTING: "it has no repeated layers"}})
    assert LayoutChoices.of(no_layers, SHAPE, (), (1,)).checkpointing == (False,)


def test_every_layout_divides_the_devices_the_batch_and_keeps_groups_on_a_host() -> None:
    choices = LayoutChoices(tensors=(1, 2, 8, 16), pipelines=(1, 4, 64), zero_stages=(1, 2))
    found = list(choices.on(SHAPE, Cluster(device=H100, hosts=2, per_host=8), 32))
    assert {(each.tensor, each.stages) for each in found} == {(t, p) for t in (1, 2, 8) for p in (1, 4) if t * p <= 16}
    assert {each.replicas * each.micro_batch * each.accumulation for each in found} == {32}
    assert {each.zero_stage for each in found if each.stages > 1} == {1}


def test_the_named_ones_fit_are_the_fastest_first_and_each_is_at_its_best_size() -> None:
    choices = LayoutChoices(tensors=(1, 2, 4), zero_stages=(0, 1, 2), checkpointing=(False, True))
    every = list(choices.on(SHAPE, EIGHT, 64))
    named = best_layouts(iter(every), H100.memory)
    assert 1 < len(named) <= 8
    speeds = [each.tokens_per_s.value for each in named]
    assert speeds == sorted(speeds, reverse=True)
    assert all(each.bytes <= H100.memory for each in named)
    keys = [(each.tensor, each.pipeline, each.is_checkpointed) for each in named]
    assert len({*keys}) == len(keys)
    fitting = [each for each in every if each.bytes <= H100.memory]
    # Of those as fast the one that needs least memory.
    assert speeds[0] == pytest.approx(max(each.step.samples_per_s for each in fitting) * SHAPE.tokens, rel=0.01)
    assert named[0].zero_stage == 2
    assert best_layouts(iter(every), 10 * 2.0**30) == ()


def test_zero_and_tensor_parallelism_share_what_they_are_to_share() -> None:
    def states(**more: Any) -> float:
        return LaidOutDecoder(shape=SHAPE, cluster=EIGHT, **more).states / SHAPE.parameters

    assert [states(zero_stage=stage) for stage in (0, 1, 2)] == pytest.approx([16, 5.5, 3.75], rel=1e-3)
    whole, shared = states(tensor=8, divides_vocabulary=False), states(tensor=8)
    assert shared == pytest.approx(2, rel=1e-3)
    # AutoTP leaves embedding and output layer whole.
    vocabulary = 2 * SHAPE.vocabulary * SHAPE.hidden
    assert whole - shared == pytest.approx(16 * 7 / 8 * vocabulary / SHAPE.parameters, rel=1e-3)


def test_formulas_are_held_against_the_run_of_the_same_arm() -> None:
    choices = LayoutChoices(zero_stages=(2,))
    (named,) = best_layouts(choices.on(SHAPE, EIGHT, 64), H100.memory)
    speed = named.tokens_per_s.value / 1.25
    arm = PlannedArm(
        label="z2",
        micro_batch=named.micro_batch,
        largest_micro_batch=8,
        tokens_per_s=PlannedRange(value=speed, low=speed, high=speed),
    )
    devices = PlannedDevices(device="h100-80gb", nodes=1, per_node=8, arms=(arm,))
    assert beside_runs(devices, [named]) == "Of z2 without a layout they have 1.25 times the speed that its run has."
    assert beside_runs(devices.model_copy(update={"arms": ()}), [named]) == ""
