"""The first run of a profile trial, on real ranks: it trains on, and measures the user's configuration."""

import dataclasses
import json
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import CONFIG, PROGRAMS, Trials

from zerotune.trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH
from zerotune.trial_lib.device.this_host import this_host
from zerotune.trial_lib.launch.starters import WarmStarter
from zerotune.trial_lib.launch.trial import ThisHost
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.candidate import Purpose, Sweep, Withdrawal
from zerotune.trial_lib.records.result import Outcome


class FirstRun:
    """A program as typed, with a micro-batch of 4 and two accumulation steps: the profile, and what follows it."""

    def __init__(
        self,
        trials: Trials,
        starter: WarmStarter,
        script: str,
        *arguments: str,
        slots: int = 1,
        model_dir: Path = PROGRAMS,
    ) -> None:
        self.notes: list[str] = []
        one_step = StepWindow(1, 1, max_steps=1)
        plan = trials.plan(
            script, *arguments, slots=slots, window=one_step, purpose=Purpose.PROFILE, model_dir=model_dir
        )
        own = {**CONFIG, MICRO_BATCH: 4, ACCUMULATION: 2}
        (trials.root / "own.json").write_text(json.dumps(own))
        given = [plan.program.arguments[0], str(trials.root / "own.json"), *plan.program.arguments[2:]]
        program = dataclasses.replace(plan.program, arguments=given)
        typed = dataclasses.replace(plan, ds_config=own, as_typed=True, program=program, paths=plan.paths.as_typed)
        plan.paths.root.mkdir()
        following = trials.plan(script, slots=slots, purpose=Purpose.SUBMITTED)
        self.following = dataclasses.replace(
            typed,
            trial_id=following.trial_id,
            number=following.number,
            purpose=Purpose.SUBMITTED,
            window=StepWindow(),
            traces=True,
            paths=following.paths,
        )
        both = Sweep((typed.candidate, following.candidate), 0.0, 0.0)
        self.profile, self.own = self._ends([typed, self.following], both, starter, trials)

    def _ends(self, plans: Any, both: Sweep, starter: WarmStarter, trials: Trials) -> Any:
        place = ThisHost(starter, this_host(), trials.lock_dir)
        return place.run_sweep(plans, both, threading.Event(), self.notes.append, lambda *_: None)


@pytest.mark.long
@pytest.mark.parametrize("slots", [pytest.param(1, marks=pytest.mark.long), 2])
def test_the_program_trains_on_and_is_measured_as_typed(trials: Trials, warm_starter: WarmStarter, slots: int) -> None:
    run = FirstRun(trials, warm_starter, "transformer.py", slots=slots)
    assert run.profile.outcome is run.own.outcome is Outcome.COMPLETED, (run.profile.reason, run.own)
    assert run.profile.profile.flops_per_sample > 0
    assert run.profile.program.typed_batch.micro_batch_size == run.own.micro_batch_arrived == 4
    assert len(run.profile.step_times) == 1
    assert len(run.own.step_times) >= 3
    samples = 4 * 2 * slots
    assert run.own.metrics["throughput"] == pytest.approx(samples / run.own.metrics["latency"])
    flops = run.profile.profile.flops_per_sample * run.own.metrics["throughput"] / slots
    assert run.own.metrics["FLOPS_per_gpu"] == pytest.approx(flops)
    assert run.own.traced is not None
    assert run.own.traced.seconds > 0, run.own.traced.failure
    assert run.own.profile is None
    assert run.own.memory.after_initialize == run.profile.memory.after_initialize


@pytest.mark.long
@pytest.mark.alone
def test_it_measures_what_a_trial_of_its_own_measures(trials: Trials, warm_starter: WarmStarter) -> None:
    run = FirstRun(trials, warm_starter, "transformer.py")
    plan = dataclasses.replace(
        run.following,
        paths=trials.plan("transformer.py").paths,
        flops_per_sample=run.profile.profile.flops_per_sample,
        formats=run.profile.formats,
        traces=False,
    )
    alone = trials.start(plan).result()
    assert alone.outcome is Outcome.COMPLETED, alone.reason
    assert run.own.metrics.keys() == alone.metrics.keys()
    # Two readings on a shared machine: the bound only tells a step from a micro-batch, and seconds from milliseconds.
    assert 0.5 < run.own.metrics["cpu_time_per_sample"] / alone.metrics["cpu_time_per_sample"] < 1.9
    above = [max(result.memory.above_initialize) for result in (run.own, alone)]
    assert above[0] == pytest.approx(above[1], rel=0.5, abs=20e6)


@pytest.mark.parametrize(
    "how", ["return", *(pytest.param(how, marks=pytest.mark.long) for how in ("destroy", "exit 0"))]
)
def test_a_program_that_ends_after_its_profile_leaves_the_profile(
    trials: Trials, warm_starter: WarmStarter, how: str
) -> None:
    # Eight micro-batches are four optimizer steps.
    run = FirstRun(trials, warm_starter, "ends.py", "--steps", "8", "--how", how)
    assert run.profile.outcome is Outcome.COMPLETED, run.profile.reason
    assert run.profile.profile is not None
    assert isinstance(run.own, Withdrawal)
    assert not run.following.paths.root.exists()
    # The tests beside this one may hold the slots for a moment.
    assert [note for note in run.notes if not re.search(r" waits for \d of |after a wait of ", note)] == []


TRAINS_AND_WRITES = """
from pathlib import Path
import deepspeed
from toy import parse_arguments, small_model, train

args = parse_arguments()
Path("prepared.txt").write_text("once")
model = small_model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
for step in range(100):
    train(engine, 2)
    Path(f"checkpoint-{step}.txt").write_text("of a training")
"""


def test_what_the_training_writes_between_the_two_goes_with_it(
    trials: Trials, warm_starter: WarmStarter, tmp_path: Path
) -> None:
    """What a program writes before its first step stays, as its data. No trial may go on from a checkpoint."""
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(PROGRAMS / "toy.py", model)
    (model / "writes.py").write_text(TRAINS_AND_WRITES)
    run = FirstRun(trials, warm_starter, "writes.py", model_dir=model)
    assert run.profile.outcome is run.own.outcome is Outcome.COMPLETED, (run.profile.reason, run.own)
    left = {path.name for path in model.glob("*.txt")}
    assert left <= {"prepared.txt"}
    assert ("prepared.txt" in left) == (run.profile.files == "layered")
