"""The foreseen arms of a study: which runs count, what is kept, and what is said if there are none."""

import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
from study_setups import setup_of

from tests.unit.plan.test_arm_bytes import run_of
from zerotune.trial_lib.deepspeed_config.overrides import MICRO_BATCH
from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.inputs.search_space import read_search_space
from zerotune.trial_lib.study import simulated_arms
from zerotune.trial_lib.study.open_search import foreseen_in
from zerotune.trial_lib.study.simulated_arms import ArmSimulation, arms_of, is_simulated_unasked, keep_simulated
from zerotune.trial_lib.study.typed_command import read_command


class Ended:
    """A simulation whose runs have ended."""

    def __init__(self, arms, folder, failure=""):
        self._arms, self.folder, self.failure = arms, folder, failure

    def end(self):
        return self._arms


def test_an_arm_needs_both_sizes():
    assert arms_of([run_of(4), run_of(16)], "cpu") == ()
    (arm,) = arms_of([run_of(4), run_of(16), run_of(48)], "cpu")
    assert arm.backward.per_sample == 4 * 1024


def test_a_program_that_ignores_the_micro_batch_is_no_prior():
    ignored = replace(run_of(16), micro_batch=48)
    assert arms_of([run_of(16), ignored], "cpu") == ()


def test_the_program_as_typed_may_have_the_size_of_a_run():
    assert len(arms_of([run_of(16), run_of(16), run_of(48)], "cpu")) == 1


@pytest.mark.parametrize(("device", "unasked"), [("cuda", True), ("cpu", False)])
def test_only_a_study_on_gpus_foresees_unasked(device, unasked):
    assert is_simulated_unasked(device) is unasked


def simulation_of(foresees, monkeypatch, tmp_path):
    """A simulation of a program that two runs of one arm foresee."""
    monkeypatch.setattr(simulated_arms, "KnownProgram", SimpleNamespace(of=lambda *_: None))
    setup = SimpleNamespace(experiment=None, environment={}, device="cpu")
    simulation = ArmSimulation(setup, SimpleNamespace(), tmp_path, foresees)
    monkeypatch.setattr(simulation, "_simulate_all", lambda: [simulation._keep(run) for run in foresees()])
    return simulation


def test_arms_are_found_while_others_are_foreseen(monkeypatch, tmp_path):
    seen = []

    def runs():
        for size in (16, 48, 16):
            seen.append(len(simulation._arms))
            yield run_of(size)

    simulation = simulation_of(runs, monkeypatch, tmp_path)
    simulation.begin()
    assert [arm.backward.per_sample > 0 for arm in simulation.end()] == [True]
    assert seen == [0, 0, 1]


class Known:
    """The program of a study with two switches. Each change of a value is another run."""

    def __init__(self):
        self.base_config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}

    def learned(self, _):
        known = Known()
        known.base_config = {**self.base_config, "program": {"--gc": False, "--workers": 0}}
        return known


def simulation_of_space(space, stages, monkeypatch, tmp_path):
    """A simulation that foresees nothing yet."""
    monkeypatch.setattr(simulated_arms, "KnownProgram", SimpleNamespace(of=lambda *_: Known()))
    experiment = SimpleNamespace(requests=read_search_space(space))
    arguments = SimpleNamespace(zero_stages=stages)
    setup = SimpleNamespace(experiment=experiment, environment={}, device="cpu", arguments=arguments)
    return ArmSimulation(setup, SimpleNamespace(), tmp_path, None)


def test_the_runs_of_a_pipeline_have_a_micro_batch_more_than_it_has_stages(monkeypatch, tmp_path):
    simulation = simulation_of_space({}, (0, 1), monkeypatch, tmp_path)
    steps = {}

    def run(name, overrides):
        steps[name] = overrides.get("gradient_accumulation_steps")
        size = overrides.get("train_micro_batch_size_per_gpu", 2)
        return replace(run_of(size), accumulation=8, is_pipeline=True, pipeline_stages=4)

    monkeypatch.setattr(simulation, "_run", run)
    simulation._simulate_all()
    assert simulation.failure == ""
    assert steps.pop("typed") is None
    assert set(steps.values()) == {5}


def test_each_value_of_a_switch_is_foreseen_in_every_arm_if_it_changes_a_run(monkeypatch, tmp_path):
    space = {"program": {"--gc": [True, False], "--workers": [0, 4]}}
    simulation = simulation_of_space(space, (1, 2), monkeypatch, tmp_path)
    ran = {}

    def run(name, overrides):
        size = overrides.get("train_micro_batch_size_per_gpu", 2)
        switches = overrides.get("program", {})
        found = run_of(size)
        kept = found.storages[:-1] if switches.get("--gc") else found.storages
        ran[name] = replace(found, storages=kept, micro_batch=size)
        return ran[name]

    monkeypatch.setattr(simulation, "_run", run)
    simulation._simulate_all()
    assert simulation.failure == ""
    assert {name for name in ran if "as-typed" in name} == {"z1-as-typed-gc-mbs16", "z1-as-typed-workers=4-mbs16"}
    assert {name for name in ran if "as-typed" not in name} - {"typed"} == {
        f"z{stage}{switch}-mbs{size}" for stage in (1, 2) for switch in ("", "-gc") for size in (16, 48)
    }


def test_ranks_that_divide_a_batch_are_foreseen_with_that_of_all_of_them(tmp_path):
    (tmp_path / "train.py").touch()
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 1}}')
    words = ["deepspeed", "--num_gpus", "2", "train.py", "--deepspeed_config", "ds.json", "--batch_size", "4"]
    host = Host("cpu", ["0", "1"], 2**30)
    experiment = read_command(words, {MICRO_BATCH: "--batch_size"}, tmp_path, host)
    typed = []

    def run(program, overrides, *_, **__):
        size = overrides.get(MICRO_BATCH, 2)
        typed.append((program.arguments[-1], str(2 * size)))
        return replace(run_of(size), program={"divided_among": 2})

    setup = setup_of(experiment, tmp_path / "study", "cpu", zero_stages=(1,))
    simulation = ArmSimulation(setup, SimpleNamespace(), tmp_path / "runs", run)
    simulation._simulate_all()
    assert simulation.failure == ""
    assert {argument for argument, _ in typed} == {"4", "32", "96"}
    assert all(argument == of_both for argument, of_both in typed)


def test_a_study_goes_on_whatever_is_wrong_with_a_foreseen_run(monkeypatch, tmp_path):
    def runs():
        raise RuntimeError("no kernel for this")

    simulation = simulation_of(runs, monkeypatch, tmp_path)
    simulation.begin()
    assert simulation.end() == ()
    assert simulation.failure == "no kernel for this"


def test_the_arms_are_kept_for_a_resumed_study(tmp_path, caplog):
    arms = arms_of([run_of(16), run_of(48)], "cuda")
    file = tmp_path / "foreseen.json"
    assert foreseen_in(file) == ()
    with caplog.at_level(logging.INFO):
        keep_simulated(Ended(arms, tmp_path / "runs"), file, logging.getLogger())
    assert foreseen_in(file) == arms
    assert "1 foreseen arms" in caplog.text
    assert json.loads(file.read_text())[0]["ds_config"] == arms[0].ds_config


@pytest.mark.parametrize(
    ("failure", "said"), [("a shape depends on values.", "depends on values"), ("", "ended first")]
)
def test_one_line_says_why_there_are_none(tmp_path, caplog, failure, said):
    with caplog.at_level(logging.INFO):
        keep_simulated(Ended((), tmp_path / "runs", failure), tmp_path / "foreseen.json", logging.getLogger())
    assert len(caplog.records) == 1
    assert said in caplog.text
    assert not (tmp_path / "foreseen.json").exists()
