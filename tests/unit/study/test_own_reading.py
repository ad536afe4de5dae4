"""The user's configuration, as the profile trial's first run has measured it."""

import dataclasses
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zerotune.trial_lib.launch.trial import TrialPlan
from zerotune.trial_lib.messages.measurement import BatchSizes, ModelProfile, ProgramProfile
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.folders import TrialPaths
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.profile import own_reading
from zerotune.trial_lib.study.setup import is_measured_beside

PHASES = {"start": 0.2, "import": 1.0, "initialize": 0.5, "first_step": 0.25, "survey": 0.25, "end": 0.0}
METRICS = {"throughput": 10.0, "FLOPS_per_gpu": 40.0, "mfu": 0.4}


def ended(number: int = 1, **more: Any) -> TrialResult:
    fields = {"outcome": Outcome.COMPLETED, "metrics": METRICS, "started_at": 104.0, **more}
    purpose = Purpose.SUBMITTED if number else Purpose.PROFILE
    return TrialResult(trial_id=f"study-{number:04d}", number=number, purpose=purpose, config_hash="0" * 16, **fields)


PROGRAM = ProgramProfile(typed_batch=BatchSizes(32, 4, 4), rows_per_sample=1)
PROFILED = ended(
    0,
    program=PROGRAM,
    phases=PHASES,
    profile=ModelProfile(
        num_params=1,
        trainable_num_params=1,
        activation_mem_per_gpu=1,
        gpu_mem=1,
        data_parallel_size=2,
        flops_per_sample=6.0,
    ),
)


class Folder:
    """A study's folder, with the records of the profile's first run and of the measurement that followed it."""

    def __init__(self, root: Path, measured: TrialResult | None, first: TrialResult | None = None) -> None:
        self.profile = TrialPaths(root / "0000")
        self.plan = TrialPlan(
            trial_id="study-0001",
            number=1,
            purpose=Purpose.SUBMITTED,
            candidate=Candidate(micro_batch_size=4, slots=2),
            ds_config={"train_micro_batch_size_per_gpu": 4},
            config_hash="1" * 16,
            program=SimpleNamespace(files={}),  # type: ignore[arg-type]
            window=StepWindow(),
            memory_limit=None,
            deadline_s=1.0,
            paths=TrialPaths(root / "0001"),
            name="own",
        )
        first = first or ended(0, started_at=100.0, program=PROGRAM)
        for paths, result, said in ((self.profile.as_typed, first, "reads"), (self.profile.own, measured, "trains")):
            paths.root.mkdir(parents=True)
            if result is not None:
                paths.result.write_text(result.to_text())
            for rank in range(2):
                paths.log(rank).write_text(f"rank {rank} {said}\n")
                paths.measurement(rank).write_text("{}")

    def reading(self, profile: TrialResult = PROFILED, **changed: Any) -> TrialResult | None:
        return own_reading(dataclasses.replace(self.plan, **changed), profile, self.profile)


def test_it_is_the_result_of_the_users_configuration(tmp_path: Path) -> None:
    folder = Folder(tmp_path, ended())
    reading = folder.reading()
    assert reading is not None
    assert (reading.number, reading.name, reading.config_hash) == (1, "own", "1" * 16)
    assert folder.plan.paths.result.read_text() == reading.to_text()
    assert Candidate.model_validate_json(folder.plan.paths.candidate.read_text()) == folder.plan.candidate
    assert [file.name for file in folder.plan.paths.root.iterdir() if file.stat().st_mode & 0o077] == []


def test_its_start_is_what_a_warm_trial_pays(tmp_path: Path) -> None:
    """The first run has waited for the fork server. The confirmation plans with these seconds."""
    reading = Folder(tmp_path, ended(phases={"start": 0.1, "steps": 2.0, "trace": 1.0, "end": 0.3})).reading()
    assert reading is not None
    assert reading.phases == {"start": 0.2, "import": 1.0, "initialize": 0.5, "steps": 2.0, "trace": 1.0, "end": 0.3}


def test_its_log_is_that_of_the_whole_run(tmp_path: Path) -> None:
    reading = Folder(tmp_path, ended()).reading()
    assert reading is not None
    assert [Path(log).read_text() for log in reading.logs] == [
        f"rank {rank} reads\nrank {rank} trains\n" for rank in (0, 1)
    ]


def test_its_flops_are_those_of_the_profile(tmp_path: Path) -> None:
    """The first run has counted 8 FLOPs of a sample, because its samples are padded to the longest of more."""
    reading = Folder(tmp_path, ended()).reading()
    assert reading is not None
    assert reading.metrics == {"throughput": 10.0, "FLOPS_per_gpu": 30.0, "mfu": pytest.approx(0.3)}


@pytest.mark.parametrize(
    "measured",
    [
        None,
        ended(outcome=Outcome.OUT_OF_MEMORY),
        ended(note="The batch has changed."),
        replace(ended(), trial_id="another-0001"),
    ],
)
def test_without_a_measurement_a_trial_of_its_own_runs(tmp_path: Path, measured: TrialResult | None) -> None:
    folder = Folder(tmp_path, measured)
    assert folder.reading() is None
    assert not folder.plan.paths.root.exists()


def test_steps_that_did_not_wait_for_their_data_do_not_count(tmp_path: Path) -> None:
    """A program that was typed with a micro-batch of 1 surveys its data in its only run."""
    program = ProgramProfile(typed_batch=BatchSizes(8, 1, 4), rows_per_sample=1)
    folder = Folder(tmp_path, ended(), ended(0, program=program))
    assert folder.reading(replace(PROFILED, program=program)) is None


def test_a_trial_that_warms_up_on_longer_samples_runs_on_its_own(tmp_path: Path) -> None:
    assert Folder(tmp_path, ended()).reading(longest_sequence=128) is None


def test_a_trial_whose_samples_are_counted_otherwise_runs_on_its_own(tmp_path: Path) -> None:
    pairs = replace(PROFILED, program=replace(PROGRAM, rows_per_sample=2))
    assert Folder(tmp_path, ended()).reading(pairs) is None


@pytest.mark.parametrize(
    ("device", "cores", "is_measured"),
    [("cpu", 2, False), ("cpu", 3, True), ("cuda", 2, False), ("cuda", 3, True)],
)
def test_the_host_needs_cores_for_what_runs_beside_the_ranks(
    device: str, cores: int, is_measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    assert is_measured_beside(setup(device, cores)) is is_measured


def test_gpus_of_a_host_with_cores_to_spare_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    assert is_measured_beside(setup("cuda", 2))
    assert not is_measured_beside(setup("cuda", 2, ray_address="auto"))


def setup(device: str, slots: int, ray_address: str | None = None) -> Any:
    return SimpleNamespace(
        device=device,
        host=SimpleNamespace(slots=["0"] * slots),
        slots=2,
        arguments=SimpleNamespace(ray_address=ray_address),
        experiment=SimpleNamespace(config=SimpleNamespace(resources=SimpleNamespace(hosts=[]))),
    )
