"""A whole plan over runs made by hand: its tables, its answer, and what ends it."""

import copy
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan.pretended_runs import pretended_run
from zerotune.trial_lib.deepspeed_config.overrides import (
    ACCUMULATION,
    MICRO_BATCH,
    TRAIN_BATCH,
    overwrite_deepspeed_config,
)
from zerotune.trial_lib.deepspeed_config.refusals import Refusal, sentence_of
from zerotune.trial_lib.messages.errors import ProgramNotForeseenError
from zerotune.trial_lib.messages.foreseen_run import KINDS, MOMENTS, ForeseenRun
from zerotune.trial_lib.plan.answer import best_of
from zerotune.trial_lib.plan.devices import known_devices, read_devices
from zerotune.trial_lib.plan.planning import PlanProblem, WantedRun, plan
from zerotune.trial_lib.search.arms import RequestedKnob

_INPUT = KINDS.index("input")

BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 0},
}


class Foresees:
    """Foresees by hand, and remembers what was asked of it."""

    def __init__(self, parameters: int = 10**9, stopped: str = "", base: dict[str, Any] = BASE) -> None:
        self.wanted: list[WantedRun] = []
        self._parameters, self._stopped, self._base = parameters, stopped, base
        self._lock = threading.Lock()

    def __call__(self, run: WantedRun) -> ForeseenRun:
        with self._lock:
            self.wanted.append(run)
        if self._stopped:
            return ForeseenRun(world=run.asked.count, stopped=self._stopped)
        config = overwrite_deepspeed_config(self._base, copy.deepcopy(dict(run.overrides)))
        size = config["train_micro_batch_size_per_gpu"]
        steps = config.get("gradient_accumulation_steps", 1)
        return pretended_run(config, run.asked.count, size, steps, self._parameters)


def problem_of(*on: str, base: dict[str, Any] = BASE, **fields: Any) -> PlanProblem:
    asked = read_devices(on, [], known_devices())
    return PlanProblem(**{"asked": asked, "base_config": base, "stages": (0, 1, 2, 3), "processes": 2, **fields})


def test_every_arm_is_foreseen_at_two_sizes_and_on_both_numbers_of_devices() -> None:
    foresee = Foresees()
    found = plan(problem_of("h100-80gb:8", "a100-40gb:2x8"), foresee)
    names = [run.name for run in foresee.wanted]
    # The other run of its pair begins at the same time, so either may be noted first.
    assert "z0-mbs2-of16" in names[:2]
    assert sorted(name for name in names if name.startswith("z3-mbs")) == [
        "z3-mbs1-of16",
        "z3-mbs1-of8",
        "z3-mbs2-of16",
    ]
    assert len(names) == 3 * 9
    assert [devices.label for devices in found.devices] == ["h100-80gb:8", "a100-40gb:2x8"]
    for devices in found.devices:
        assert {arm.label for arm in devices.arms} >= {"z0", "z1", "z2", "z3", "z2-offload-optimizer"}
        assert devices.chosen is not None
        assert devices.answer.startswith(f"On {devices.count} {devices.device}")
        assert [each.devices for each in devices.counts] == [2**power for power in range(11)]
        best = next(arm for arm in devices.arms if arm.label == devices.best)
        (same,) = [each for each in devices.counts if each.devices == devices.count]
        assert (same.label, same.micro_batch, same.samples_per_s) == (best.label, best.micro_batch, best.samples_per_s)
    assert best_of(found.devices) == 0


@pytest.mark.parametrize("steps", [1, 16])
def test_a_batch_that_is_free_keeps_the_users_accumulation(steps: int) -> None:
    base = {**BASE, "gradient_accumulation_steps": steps}
    found = plan(problem_of("h100-80gb:8", base=base, free_batch=True), Foresees())
    assert {arm.accumulation for arm in found.devices[0].arms} == {steps}


def test_an_accumulation_that_the_code_decides_on_is_that_of_the_program_as_typed() -> None:
    class AsTyped(Foresees):
        def __call__(self, run: WantedRun) -> ForeseenRun:
            found = super().__call__(run)
            return replace(found, accumulation=4) if run.is_first else found

    base = {**BASE, "gradient_accumulation_steps": "auto"}
    foresee = AsTyped(base={**BASE, "gradient_accumulation_steps": 1})
    found = plan(problem_of("h100-80gb:8", base=base), foresee)
    assert foresee.wanted[0].overrides == {}
    assert {arm.micro_batch * arm.accumulation for arm in found.devices[0].arms} == {8}


def test_the_curve_of_a_single_device_says_that_it_has_no_transfers() -> None:
    one, eight = (plan(problem_of(f"h100-80gb:{count}"), Foresees()).devices[0] for count in (1, 8))
    assert [note for note in one.notes if "upper bounds" in note]
    assert not [note for note in eight.notes if "upper bounds" in note]


def test_all_arms_keep_the_users_global_batch() -> None:
    found = plan(problem_of("h100-80gb:8"), Foresees())
    assert {arm.micro_batch * arm.accumulation * 8 for arm in found.devices[0].arms} == {16}


def test_a_model_that_is_too_large_needs_more_devices_and_the_answer_says_how_many() -> None:
    large = Foresees(30 * 10**9)
    found = plan(problem_of("a100-40gb:8", stages=(0, 3), device="cpu"), large)
    (devices,) = found.devices
    assert devices.best == ""
    assert devices.fewest is not None
    assert devices.fewest > 8
    assert "nothing fits" in devices.answer
    assert f"on which it trains: {devices.fewest}" in devices.answer


def test_more_devices_than_the_batch_can_be_divided_over_have_the_next_larger_batch() -> None:
    problem = problem_of("h100-80gb:8", base={**BASE, "train_batch_size": 48, "gradient_accumulation_steps": 3})
    (devices,) = plan(problem, Foresees()).devices
    batches = {each.devices: each.other_batch for each in devices.counts}
    assert [*batches] == [2**power for power in range(11)]
    assert [batches[2**power] for power in range(5)] == [None] * 5
    assert [batches[2**power] for power in range(5, 11)] == [64, 64, 128, 256, 512, 1024]
    for each in devices.counts:
        assert each.micro_batch * each.accumulation * each.devices == (each.other_batch or 48)


def test_the_fewest_devices_have_another_batch_if_yours_cannot_be_divided_over_them() -> None:
    problem = problem_of("a100-40gb:8", stages=(0, 3), device="cpu", base={**BASE, "train_batch_size": 8})
    (devices,) = plan(problem, Foresees(30 * 10**9)).devices
    assert devices.fewest is not None
    assert devices.fewest > 8
    assert f"with a global batch of {devices.fewest}, because" in devices.answer


def test_arms_that_fit_on_more_devices_are_in_the_curve_of_a_slow_plan() -> None:
    def slowly(run: WantedRun) -> ForeseenRun:
        return replace(foresee(run), seconds=60.0)

    foresee = Foresees(30 * 10**9)
    (slow,) = plan(problem_of("a100-40gb:8", device="cpu"), slowly).devices
    (quick,) = plan(problem_of("a100-40gb:8", device="cpu"), Foresees(30 * 10**9)).devices
    assert [each.label for each in slow.counts] == [each.label for each in quick.counts]
    assert slow.fewest == quick.fewest
    assert slow.fewest is not None
    # What fits on no number of devices is not run.
    assert not [run for run in foresee.wanted if run.name.startswith("z1")]


def test_a_program_that_cannot_be_foreseen_ends_the_plan_with_its_sentence() -> None:
    with pytest.raises(ProgramNotForeseenError, match=r"train\.py:3 calls a kernel"):
        plan(problem_of("h100-80gb:8"), Foresees(stopped="train.py:3 calls a kernel without a fake."))


def test_a_pipeline_whose_stages_stand_in_the_code_runs_as_typed_first() -> None:
    shown: dict[str, int] = {}

    def of_four_stages(run: WantedRun) -> ForeseenRun:
        replicas = run.asked.count // 4
        config = overwrite_deepspeed_config(base, copy.deepcopy(dict(run.overrides)))
        size, steps = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
        if config.get("train_batch_size", size * steps * replicas) != size * steps * replicas:
            batch = {name: config[name] for name in (TRAIN_BATCH, MICRO_BATCH, ACCUMULATION)}
            refused = Refusal(list(batch), batch, "AssertionError: Check batch related parameters. 32 != 8.")
            return ForeseenRun(world=run.asked.count, stopped=sentence_of(refused, "DeepSpeed", [], 8)[0])
        made = pretended_run(config, run.asked.count, size, steps)
        shown[run.name] = steps
        return replace(made, replicas=replicas, is_pipeline=True, pipeline_stages=4)

    base = {**BASE, "gradient_accumulation_steps": 4, "zero_optimization": {"stage": 1}}
    switch = RequestedKnob("program.--twice", (True, False), coarse=True)
    problem = problem_of("h100-80gb:8", base=base, requests=[switch], switches={"--twice": False})
    found = plan(problem, of_four_stages)
    (devices,) = found.devices
    assert {arm.label for arm in devices.arms} == {"z0", "z1", "z1-offload-optimizer"}
    assert not any(arm.stopped for arm in devices.arms)
    assert devices.chosen is not None
    assert devices.chosen.micro_batch * devices.chosen.accumulation == 8
    assert [each.devices for each in devices.counts] == [2**power for power in range(2, 11)]
    # The first of four stages holds the activations of four micro-batches, and after the fifth gradients as well. All
    # sizes have so many, or no line would go through two of them.
    assert shown.pop("as-typed-of8") == 4
    assert set(shown.values()) == {5}
    assert [name for name in shown if "as-typed" in name]


def test_an_interrupt_ends_the_plan_between_runs() -> None:
    foresee = Foresees()

    def slowly(run: WantedRun) -> ForeseenRun:
        time.sleep(0.05)
        return foresee(run)

    def check() -> None:
        if len(foresee.wanted) > 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plan(problem_of("h100-80gb:8", processes=1), slowly, check=check)
    assert len(foresee.wanted) < 19


def test_a_plan_notes_a_request_that_nothing_comes_of() -> None:
    found = plan(problem_of("h100-80gb:8", requests=[RequestedKnob("compile.deepcompile", (True, False))]), Foresees())
    assert [note for note in found.notes if "compile.deepcompile has no effect" in note]


def test_it_says_what_it_does() -> None:
    told: list[str] = []
    plan(problem_of("h100-80gb:8", stages=(2,)), Foresees(), told.append)
    assert told[0].startswith("foreseen: z0-mbs2-of8")
    assert any("(2 of " in text for text in told)
    assert told[-1] == "working out memory and time on h100-80gb:8"


def test_a_program_in_whose_code_the_batch_stands_runs_as_typed_first() -> None:
    base = {**BASE, "train_micro_batch_size_per_gpu": "auto"}
    foresee = Foresees(base={**BASE, "train_micro_batch_size_per_gpu": 2})
    plan(problem_of("h100-80gb:8", base=base), foresee)
    assert (foresee.wanted[0].name, foresee.wanted[0].overrides) == ("as-typed-of8", {})


def test_a_program_that_ignores_the_size_is_judged_at_its_own() -> None:
    foresee = Foresees()

    def ignores(run: WantedRun) -> ForeseenRun:
        found = foresee(run)
        asked = found.micro_batch
        config = {**found.ds_config, "train_micro_batch_size_per_gpu": 2}
        return replace(pretended_run(config, run.asked.count, 2), micro_batch=asked)

    (devices,) = plan(problem_of("h100-80gb:8", stages=(0, 2)), ignores).devices
    assert {arm.micro_batch for arm in devices.arms} == {2}
    assert any("micro-batch 2 alone" in note for note in devices.notes)


def test_a_batch_that_the_program_makes_on_the_device_ignores_the_size_too() -> None:
    base = {**BASE, "gradient_accumulation_steps": 4}
    foresee = Foresees(base=base)
    temporary = KINDS.index("temporary")

    def ignores(run: WantedRun) -> ForeseenRun:
        found = foresee(run)
        made = pretended_run(found.ds_config, run.asked.count, 2, found.accumulation)
        storages = tuple(each._replace(kind=temporary) if each.kind == _INPUT else each for each in made.storages)
        return replace(made, micro_batch=found.micro_batch, storages=storages)

    (devices,) = plan(problem_of("h100-80gb:8", stages=(0, 2), base=base), ignores).devices
    assert {arm.micro_batch for arm in devices.arms} == {2}


def test_a_program_that_calls_its_module_and_not_the_engine_ignores_the_size_too() -> None:
    foresee = Foresees()

    def ignores(run: WantedRun) -> ForeseenRun:
        found = foresee(run)
        made = pretended_run(found.ds_config, run.asked.count, 2)
        # No engine sees its forward pass.
        kept = [each for each in made.moments if MOMENTS[each.name] != "forward"]
        return replace(made, micro_batch=found.micro_batch, moments=tuple(kept))

    (devices,) = plan(problem_of("h100-80gb:8", stages=(0, 2)), ignores).devices
    assert any("micro-batch 2 alone" in note for note in devices.notes)


def test_a_program_that_takes_the_size_has_no_note_on_it() -> None:
    (devices,) = plan(problem_of("h100-80gb:8", stages=(0, 2)), Foresees()).devices
    assert not any("stay as they are" in note for note in devices.notes)


def test_if_runs_take_long_one_pair_stands_for_the_growth_of_all_and_hopeless_arms_are_not_run() -> None:
    foresee = Foresees(6 * 10**9)

    def slowly(run: WantedRun) -> ForeseenRun:
        return replace(foresee(run), seconds=60.0)

    problem = problem_of("h100-80gb:8", "h100-80gb:2x8", base={**BASE, "zero_optimization": {"stage": 2}})
    found = plan(problem, slowly)
    names = [run.name for run in foresee.wanted]
    assert "z0-mbs1-of16" not in names
    assert [name for name in names if "mbs2" in name] == ["z2-mbs2-of16"]
    # No core waits at the end for the second run of the pair.
    assert names.index("z2-mbs2-of16") < 3
    assert not [name for name in names if name.endswith("-of8")]
    exact = plan(problem, Foresees(6 * 10**9))
    for quick, slow in zip(found.devices, exact.devices, strict=True):
        rows = {arm.label: arm for arm in slow.arms}
        for arm in quick.arms:
            assert arm.peak is not None
            if arm.label == "z0":
                assert not arm.is_likely
                assert arm.memory_bound.startswith("states")
                continue
            assert arm.largest_micro_batch == rows[arm.label].largest_micro_batch
            assert arm.peak.value == pytest.approx(rows[arm.label].peak.value, rel=0.02)
            speeds = [each.samples_per_s and each.samples_per_s.value for each in (arm, rows[arm.label])]
            assert speeds[0] == (None if speeds[1] is None else pytest.approx(speeds[1], rel=0.02))


def test_the_other_run_of_the_users_pair_goes_on_beside_the_first() -> None:
    foresee = Foresees()
    plan(problem_of("h100-80gb:8"), foresee)
    first, other = foresee.wanted[:2]
    assert {first.name: first.is_first, other.name: other.is_first} == {"z0-mbs2-of8": True, "z0-mbs1-of8": False}
    names = [run.name for run in foresee.wanted]
    assert len(names) == len(set(names))


_OFFLOADED = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


@pytest.mark.parametrize("own", [{"stage": 0}, {"stage": 3, **_OFFLOADED}])
def test_no_core_waits_long_for_the_last_run_because_long_ones_come_first(own: dict[str, Any]) -> None:
    foresee = Foresees(base={**BASE, "zero_optimization": own})

    def length(name: str) -> tuple[int, int]:
        return int(name[1]), name.count("offload")

    def takes_longer_at_stage_3(run: WantedRun) -> ForeseenRun:
        stage, offloads = length(run.name)
        # Fewer offloads take longer here, so what was measured decides as soon as it is known.
        return replace(foresee(run), seconds=(1 + stage - offloads / 10) / 100)

    base = {**BASE, "zero_optimization": own}
    plan(problem_of("h100-80gb:8", "a100-40gb:2x8", base=base, processes=1), takes_longer_at_stage_3)
    # The first run is as typed.
    names = [run.name for run in foresee.wanted[1:]]
    small = [name for name in names if name.endswith("-mbs1-of16")]
    further = [name for name in names if name not in small]
    assert names == [*small, *further]
    assert small == sorted(small, key=length, reverse=True)
    seconds = [length(name)[0] - length(name)[1] / 10 for name in further]
    assert seconds == sorted(seconds, reverse=True)
    assert len(small) > 5
    assert {name.split("-mbs")[1] for name in further} == {"2-of16", "1-of8"}


def test_on_one_core_the_first_run_is_alone() -> None:
    foresee = Foresees()
    plan(problem_of("h100-80gb:8", processes=1), foresee)
    assert not any(run.is_ahead for run in foresee.wanted)


class _WaitsAhead(Foresees):
    """Foresees by hand, but its run ahead goes on until it is ended."""

    def __init__(self, **first: Any) -> None:
        super().__init__()
        self.ended: set[str] = set()
        self._first = first
        self._end = threading.Event()

    def __call__(self, run: WantedRun) -> ForeseenRun:
        found = super().__call__(run)
        if run.is_ahead and not self._end.wait(20):
            raise TimeoutError(f"{run.name} was not ended")
        return replace(found, **self._first) if run.is_first else found

    def end(self, name: str) -> None:
        self.ended.add(name)
        self._end.set()


def test_samples_of_other_lengths_in_other_runs_are_told() -> None:
    class Varies(Foresees):
        def __call__(self, run: WantedRun) -> ForeseenRun:
            return replace(super().__call__(run), tokens=900 if "mbs2" in run.name else 1000)

    said = [note for note in plan(problem_of("a100-40gb:8"), Varies(10**9)).notes if "900 to 1,000 tokens" in note]
    assert len(said) == 1
    assert not any("tokens" in note for note in plan(problem_of("a100-40gb:8"), Foresees(10**9)).notes)


def test_where_a_trial_would_stop_as_well_no_trial_is_proposed() -> None:
    lacks = _WaitsAhead(stopped="ModuleNotFoundError: No module named 'apex', at train.py:3.")
    with pytest.raises(ProgramNotForeseenError) as caught:
        plan(problem_of("a100-40gb:8"), lacks, end=lacks.end)
    assert "estimate" not in str(caught.value)


def test_a_run_beside_the_first_ends_at_once_if_the_first_was_stopped() -> None:
    foresee = _WaitsAhead(stopped="train.py:3 was at it when 300 s were over.")
    with pytest.raises(ProgramNotForeseenError, match="300 s were over"):
        plan(problem_of("h100-80gb:8"), foresee, end=foresee.end)
    assert foresee.ended == {"z0-mbs1-of8"}


def test_a_run_that_lacked_the_flags_of_the_command_ends_and_is_repeated_with_them() -> None:
    foresee = _WaitsAhead(program={"arg_mappings": {"train_micro_batch_size_per_gpu": "--batch"}})
    plan(problem_of("h100-80gb:8", stages=(0,)), foresee, end=foresee.end)
    assert foresee.ended == {"z0-mbs1-of8"}
    assert [run.name for run in foresee.wanted if not run.is_ahead].count("z0-mbs1-of8") == 1
