"""Layouts of a decoder by formulas: which a program can have, what fits, and when formulas do not hold."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zerotune.trial_lib.messages.foreseen_run import MOMENTS, ForeseenRun
from zerotune.trial_lib.messages.turned import CHECKPOINTING
from zerotune.trial_lib.plan.decoder import DecoderShape, decoder_of
from zerotune.trial_lib.plan.devices import Cluster, known_devices
from zerotune.trial_lib.plan.laid_out import LaidOutDecoder, Writing
from zerotune.trial_lib.plan.layouts import (
    LAYOUTS_BY,
    LayoutChoices,
    best_layouts,
    notes_on,
    planned_layouts,
    with_layouts,
)
from zerotune.trial_lib.plan.plan_record import PlanArguments, PlannedArm, PlannedDevices, PlannedRange
from zerotune.trial_lib.plan.step_time import kind_of
from zerotune.trial_lib.search.arms import RequestedKnob

LLAMA_8B = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocabulary": 128256}
SHAPE = DecoderShape(parameters=8_030_261_248, tokens=4096, **LLAMA_8B)
MIXTURE = {"experts": 8, "chosen": 2, "expert_ffn": 14336, "by_autoep": 1}
MIXTRAL = DecoderShape(parameters=46_702_792_704, tokens=4096, **{**LLAMA_8B, **MIXTURE, "vocabulary": 32000})
H100 = known_devices()["h100-80gb"]
EIGHT = Cluster(device=H100, per_host=8)
ALL = (0, 1, 2, 3)


def _run(**more: Any) -> ForeseenRun:
    program = {"decoder": LLAMA_8B, **more.pop("program", {})}
    config = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}}
    given = {"ds_config": config, "parameters": 8_030_261_248, "trainable": 8_030_261_248, "program": program}
    return replace(_laid_out(zero_stage=2).as_run(), **{**given, **more})


def _laid_out(**more: Any) -> LaidOutDecoder:
    return LaidOutDecoder(
        **{"shape": SHAPE, "cluster": EIGHT, "by_deepspeed": True, "divides_vocabulary": False, **more}
    )


def _choices(run: ForeseenRun, shape: DecoderShape = SHAPE, requests: Any = (), stages: Any = ALL) -> LayoutChoices:
    return LayoutChoices.of(run, shape, EIGHT, requests, stages)


def test_the_shape_comes_from_the_model_s_own_numbers() -> None:
    assert decoder_of(_run()) == SHAPE
    assert SHAPE.counted_parameters == pytest.approx(SHAPE.parameters, rel=1e-3)


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (_run(program={"decoder": {}}), "is no decoder"),
        (_run(tokens=None), "have no tokens"),
        (_run(trainable=20_000_000), "all weights"),
        (_run(ds_config={"optimizer": {"type": "Adam"}}), "16 bits"),
        (_run(ds_config={"bf16": {"enabled": True}, "optimizer": {"type": "Lion"}}), "Adam"),
        (_run(ds_config={"fp16": {"enabled": True}}, program={"optimizer": "bitsandbytes.optim.AdamW8bit"}), "Adam"),
        (_run(parameters=47_000_000_000, trainable=47_000_000_000), "and the model 47,000,000,000"),
    ],
)
def test_other_models_get_no_layouts_but_a_reason(run: ForeseenRun, reason: str) -> None:
    said = decoder_of(run)
    assert isinstance(said, str)
    assert reason in said


def test_a_mixture_has_the_parameters_of_all_experts() -> None:
    assert MIXTRAL.counted_parameters == pytest.approx(MIXTRAL.parameters, rel=1e-3)
    # One layer in four has experts, beside which a part computes all tokens.
    few = replace(MIXTRAL, dense_layers=24, shared_ffn=14336)
    of_experts = 3 * 4096 * 14336
    assert MIXTRAL.counted_parameters - few.counted_parameters == 24 * (7 * of_experts + 4096 * 8) - 8 * of_experts


def test_a_program_has_the_groups_that_divide_its_heads_and_the_sizes_that_are_requested() -> None:
    plain = _choices(_run())
    assert (plain.tensors, plain.sequences, plain.pipelines, plain.experts) == ([1, 2, 4, 8], [1], [1], [1])
    asked = (
        RequestedKnob("program.--stages", (2, 4), layout="pipeline"),
        RequestedKnob("program.RANKS", ("1", "2", None), layout="sequence"),
        RequestedKnob("tensor_parallel.autotp_size", (2,)),
    )
    some = _choices(_run(), requests=asked)
    assert (some.tensors, some.sequences, some.pipelines) == ([1, 2], [1, 2], [1, 2, 4])
    assert some.by_autotp
    assert not _choices(_run(), requests=(RequestedKnob("program.--tp", (2,), layout="tensor"),)).by_autotp


def test_sizes_that_the_code_sets_stay_unless_they_are_varied() -> None:
    ulysses = replace(_laid_out(sequence=4).as_run(), program={"decoder": LLAMA_8B}, parameters=8_030_261_248)
    assert _choices(ulysses).sequences == [4]
    own = replace(_laid_out(tensor=4).as_run(), program={"decoder": LLAMA_8B}, parameters=8_030_261_248)
    assert (_choices(own).tensors, _choices(own).by_autotp) == ([4], False)
    config = {"tensor_parallel": {"autotp_size": 4}}
    by_autotp = _choices(replace(own, ds_config=config))
    assert (by_autotp.tensors, by_autotp.by_autotp) == ([1, 2, 4, 8], True)
    stages = _laid_out(stages=2, accumulation=4)
    pipeline = replace(stages.as_run(stages.by_stage[0]), is_pipeline=True, program={"decoder": LLAMA_8B})
    assert (_choices(pipeline).pipelines, _choices(pipeline).tensors) == ([2], [1])


def _sizes(choices: LayoutChoices, shape: DecoderShape = SHAPE) -> set[tuple[int, int, int, int, int]]:
    return {
        (each.tensor, each.sequence, each.stages, each.expert, each.zero_stage) for each in choices.on(shape, EIGHT, 64)
    }


def test_deepspeed_s_refusals_are_no_layouts() -> None:
    # Nine heads cannot be divided.
    three = replace(SHAPE, heads=9, kv_heads=3)
    assert {sizes[0] for sizes in _sizes(_choices(_run()), three)} == {1}
    of_code = LayoutChoices(sequences=(1, 2, 3), pipelines=(1, 2, 64))
    assert _sizes(of_code) == {
        *((1, 1, 1, 1, stage) for stage in ALL),
        *((1, 2, 1, 1, stage) for stage in ALL),
        *((1, 1, 2, 1, stage) for stage in (0, 1)),
    }
    odd = replace(SHAPE, tokens=4095)
    assert {sizes[1] for sizes in _sizes(of_code, odd)} == {1}


def test_experts_are_divided_by_autoep_or_by_the_program_below_stage_3() -> None:
    run = _run(program={"decoder": {**LLAMA_8B, **MIXTURE}})
    by_autoep = _choices(run, MIXTRAL)
    # Nothing is known of AutoTP together with experts.
    assert (by_autoep.tensors, by_autoep.experts) == ([1], [1, 2, 4, 8])
    assert (1, 1, 1, 8, 3) in _sizes(by_autoep, MIXTRAL)
    assert _choices(run, replace(MIXTRAL, by_autoep=0)).experts == [1]
    own = _choices(run, MIXTRAL, (RequestedKnob("program.--ep_size", (1, 4), layout="expert"),))
    assert own.experts == [1, 4]
    assert {sizes[4] for sizes in _sizes(own, MIXTRAL)} == {0, 1, 2}


def test_checkpointing_is_tried_if_it_can_be_turned_and_stays_as_the_run_shows_it_if_not() -> None:
    turnable = {"decoder": LLAMA_8B, "turnable": {CHECKPOINTING: ["none", "full", "every_second"]}}
    assert _choices(_run(program=turnable)).recomputed == [0, 16, 32]
    for layers in (0, 16, 32):
        run = replace(_laid_out(recomputed=layers).as_run(), program={"decoder": LLAMA_8B})
        assert _choices(run).recomputed == [layers]


def test_a_batch_that_the_program_fixes_stays() -> None:
    fixed = _choices(_run(micro_batch=2, program={"fixed_batch": "its batches have two samples"}))
    assert {each.micro_batch for each in fixed.on(SHAPE, EIGHT, 64)} == {2}
    few = LayoutChoices.of(_run(), SHAPE, EIGHT, (), ALL, most=3)
    assert {each.micro_batch for each in few.on(SHAPE, EIGHT, 48)} == {1, 2, 3}


def test_every_layout_divides_the_devices_the_batch_and_keeps_groups_on_a_host() -> None:
    choices = LayoutChoices(tensors=(1, 2, 8, 16), pipelines=(1, 4, 64), zero_stages=(1, 2), by_autotp=False)
    found = list(choices.on(SHAPE, Cluster(device=H100, hosts=2, per_host=8), 32))
    assert {(each.tensor, each.stages) for each in found} == {(t, p) for t in (1, 2, 8) for p in (1, 4) if t * p <= 16}
    assert {each.replicas * each.micro_batch * each.accumulation for each in found} == {32}
    assert {each.zero_stage for each in found if each.stages > 1} == {1}


def test_the_named_ones_fit_are_the_fastest_first_and_each_is_at_its_best_size() -> None:
    choices = LayoutChoices(tensors=(1, 2, 4), zero_stages=(0, 1, 2), recomputed=(0, 16, 32))
    every = list(choices.on(SHAPE, EIGHT, 64))
    best = best_layouts(every, H100.memory)
    named = planned_layouts(every, H100.memory)
    speeds = [each.step.samples_per_s for each in best if each.fits(H100.memory) >= 0.8]
    assert speeds == sorted(speeds, reverse=True)
    assert sorted(each.tensor for each in named) == [1, 2, 4]
    fitting = [each for each in every if each.fits(H100.memory) >= 0.8]
    # Of those as fast the one that needs least memory.
    assert speeds[0] == pytest.approx(max(each.step.samples_per_s for each in fitting), rel=0.01)
    assert planned_layouts(every, 10 * 2.0**30) == ()


def test_as_many_layers_are_recomputed_as_the_memory_asks_for() -> None:
    every = list(LayoutChoices(zero_stages=(2,), recomputed=(0, 16, 32), micro_batch=1).on(SHAPE, EIGHT, 8))
    counts = [next(iter(planned_layouts(every, gib * 2.0**30))).recomputed for gib in (79, 62, 45)]
    assert counts == [0, 16, 32]


def test_zero_and_tensor_parallelism_share_what_they_are_to_share() -> None:
    def states(**more: Any) -> float:
        return LaidOutDecoder(shape=SHAPE, cluster=EIGHT, **more).states / SHAPE.parameters

    assert [states(zero_stage=stage) for stage in ALL] == pytest.approx([16, 5.5, 3.75, 2], rel=1e-3)
    assert states(tensor=8) == pytest.approx(2, rel=1e-3)
    # AutoTP leaves the embedding whole.
    vocabulary = SHAPE.vocabulary * SHAPE.hidden
    by_autotp = _laid_out(tensor=8).states / SHAPE.parameters
    assert by_autotp - states(tensor=8) == pytest.approx(16 * 7 / 8 * vocabulary / SHAPE.parameters, rel=1e-3)
    # Ulysses leaves all parameters whole, and ZeRO divides their states over the ranks of all replicas.
    assert _laid_out(sequence=4).states == _laid_out().states
    # Its gradients are summed in 32 bits, in a bucket of 5e8 of them.
    assert _laid_out(sequence=4, zero_stage=1).states == _laid_out(zero_stage=1).states + 2 * 5e8
    # Experts are divided. At stage 1 their states are shared by the ranks that have the same ones.
    of_experts = 16 * MIXTRAL.all_experts * MIXTRAL.layers

    def of_mixtral(**more: Any) -> float:
        return _laid_out(shape=MIXTRAL, **more).states

    assert of_mixtral() - of_mixtral(expert=4) == pytest.approx(3 / 4 * of_experts)
    shared = of_mixtral(zero_stage=1) - of_mixtral(zero_stage=1, expert=4)
    assert shared == pytest.approx(4 / 16 * 3 / 4 * of_experts, rel=1e-3)


def test_each_recomputed_layer_keeps_its_input_alone() -> None:
    kept = [_laid_out(recomputed=count, shape=replace(SHAPE, vocabulary=1000)).activations for count in (0, 16, 32)]
    assert kept[0] - kept[1] == pytest.approx(kept[1] - kept[2], rel=0.07)
    assert kept[2] < kept[0] / 10


def _collectives(decoder: LaidOutDecoder) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for moment, operations in decoder.as_run().operations_by_moment():
        kinds = Counter(kind_of(each) for each in operations if each.ranks > 1)
        found.setdefault(MOMENTS[moment.name], kinds)
    return found


def test_each_layout_has_the_transfers_of_its_kind() -> None:
    of_autotp = _collectives(_laid_out(tensor=4, accumulation=2))
    # Two sums and the logits; the gradients of three matrices' inputs, and of two, and that of the output layer's.
    assert of_autotp["forward"] == {"all_reduce": 64, "all_gather": 1}
    assert of_autotp["backward"] == {"all_reduce": 161}
    of_megatron = _collectives(_laid_out(tensor=4, accumulation=2, by_deepspeed=False, divides_vocabulary=True))
    assert of_megatron["backward"] == {"all_reduce": 65}
    of_ulysses = _collectives(_laid_out(sequence=4, accumulation=2))
    assert of_ulysses["forward"] == of_ulysses["backward"] == {"all_to_all": 128}
    of_experts = _collectives(_laid_out(shape=MIXTRAL, expert=4, accumulation=2))
    assert of_experts["forward"] == of_experts["backward"] == {"all_to_all": 64}
    # DeepSpeed sums gradients with each micro-batch at stage 2, and with the last at stage 1.
    assert [_collectives(_laid_out(zero_stage=stage, accumulation=2))["backward"]["all_reduce"] for stage in ALL] == [
        *(0, 0, 34, 0)
    ]
    of_stage_3 = _collectives(_laid_out(zero_stage=3, accumulation=2))
    assert of_stage_3["forward"] == {"all_gather": 34}
    # Those of the last layers are still there.
    assert of_stage_3["backward"] == {"all_gather": 28, "reduce_scatter": 34}


def test_a_run_shows_how_the_program_writes_a_layer() -> None:
    written = Writing(forward=40, backward=90, modules=14, moved=1.7)
    for more in ({}, {"tensor": 2}, {"zero_stage": 3}):
        found = Writing.of(_laid_out(writing=written, **more).as_run(), _laid_out(**more))
        assert found.forward == pytest.approx(40, rel=0.05)
        assert found.backward == pytest.approx(90, rel=0.05)
        assert found.moved == pytest.approx(1.7, rel=0.05)
        assert found.modules == pytest.approx(14, abs=1.5)
    # What the host issues decides a small step, and each module costs at stage 3.
    only_updates = replace(_laid_out().as_run(), moments=_laid_out().as_run().moments[-1:])
    assert Writing.of(only_updates, _laid_out()) == Writing()
    slow = _laid_out(writing=written, shape=replace(SHAPE, hidden=256, tokens=128)).step
    assert slow.bound == "launches"


def test_groups_that_reach_over_hosts_may_be_far_slower_than_foreseen() -> None:
    """As one launch in twenty on public grids was."""
    two_hosts = Cluster(device=H100, hosts=2, per_host=8)

    def surely(**more: Any) -> float:
        step = _laid_out(micro_batch=8, **more).step
        return step.seconds / step.high

    for narrow in ({"tensor": 8}, {"stages": 2, "cluster": EIGHT}):
        assert surely(**{"cluster": two_hosts, **narrow}) > 0.5
    for wide in ({"stages": 2}, {"tensor": 16}):
        assert surely(cluster=two_hosts, **wide) == pytest.approx(1 / 45)


def test_formulas_are_held_against_the_run_of_the_same_arm() -> None:
    every = list(LayoutChoices(zero_stages=(2,)).on(SHAPE, EIGHT, 64))
    (named,) = planned_layouts(every, H100.memory)
    speed, peak = named.tokens_per_s.value / 1.25, named.bytes / 1.1
    arm = PlannedArm(
        label="z2",
        micro_batch=named.micro_batch,
        largest_micro_batch=8,
        peak=PlannedRange(value=peak, low=peak, high=peak),
        tokens_per_s=PlannedRange(value=speed, low=speed, high=speed),
    )
    devices = PlannedDevices(device="h100-80gb", nodes=1, per_node=8, arms=(arm,))
    said = "Of z2 without a layout they have 1.25 times the speed that its run has, and 1.10 times the memory."
    assert notes_on(devices, [named], every, ()) == (LAYOUTS_BY, said)
    assert notes_on(devices.model_copy(update={"arms": ()}), [named], every, ()) == (LAYOUTS_BY,)


def test_requests_that_no_layout_can_have_are_said_and_so_is_a_table_without_rows() -> None:
    devices = PlannedDevices(device="h100-80gb", nodes=1, per_node=8)
    requests = (RequestedKnob("program.--ranks", (1, 2, 3, 16), layout="sequence"), RequestedKnob("program.--lr", (1,)))
    choices = _choices(_run(), requests=requests)
    every = list(choices.on(SHAPE, EIGHT, 64))
    said = "No layout has --ranks 3 or 16: it does not divide the devices, the batch, or the model."
    assert notes_on(devices, planned_layouts(every, H100.memory), every, requests)[1:] == (said,)
    assert notes_on(devices, (), every, requests) == (f"None of {len(every)} layouts fits, by formulas.",)


def test_a_table_gets_layouts_or_the_reason_why_it_has_none(tmp_path: Path) -> None:
    devices = PlannedDevices(device="h100-80gb", nodes=1, per_node=8, usable=H100.memory)
    arguments = PlanArguments(command=("train.py",), model_dir=tmp_path, zero_stages=(2,))
    table = with_layouts(devices, _run(), EIGHT, 64, (), arguments)
    assert {(each.tensor, each.zero_stage) for each in table.layouts} == {(1, 2), (2, 2), (4, 2), (8, 2)}
    assert table.notes[0] == LAYOUTS_BY
    other = with_layouts(devices, _run(tokens=None), EIGHT, 64, (), arguments)
    assert other.layouts == ()
    assert other.notes[0].startswith("No layouts are named: the model is no decoder")
