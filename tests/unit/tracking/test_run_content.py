import json
from pathlib import Path

import pytest

from zerotune.trial_lib.inputs.known_secrets import KnownSecrets
from zerotune.trial_lib.messages.measurement import Memory, ModelProfile
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.folders import (
    FullExperimentPaths,
    FullExperimentRecord,
    StudyPaths,
    StudyRecord,
    StudyStatus,
)
from zerotune.trial_lib.records.result import Neighbour, Outcome, TrialDevice, TrialResult
from zerotune.trial_lib.report.estimate_report import estimate_report
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.known_trials import KnownTrials
from zerotune.trial_lib.tracking.run_content import (
    MetricValue,
    RunContent,
    flatten,
    full_experiment_content,
    study_content,
    trial_content,
)
from zerotune.trial_lib.tracking.runs import without_secrets

RECORD = StudyRecord(
    study_id="s-1",
    name="hello",
    method="asha",
    metric="throughput",
    arguments={"max_trials": 50, "settings": {"divisor": 2}, "zero_stages": [1, 2]},
    ds_config={"zero_optimization": {"stage": 1}},
)


def trial(tmp_path: Path, candidate: Candidate, **result: object) -> RunContent:
    paths = StudyPaths(tmp_path).trial(7)
    paths.root.mkdir(parents=True)
    fields = {"trial_id": "s-1/0007", "number": 7, "purpose": Purpose.SEARCH, "config_hash": "abc", **result}
    fields.setdefault("outcome", Outcome.COMPLETED)
    paths.candidate.write_text(candidate.model_dump_json())
    paths.result.write_text(TrialResult.from_json(fields).to_text())
    return trial_content(RECORD, paths, "parent")


def test_knobs_are_params_under_dotted_names(tmp_path: Path) -> None:
    knobs = {"zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}}}
    candidate = Candidate(knobs=knobs, micro_batch_size=8, gradient_accumulation_steps=2, slots=2, data_parallel_size=2)
    assert trial(tmp_path, candidate).params == {
        "zero_optimization.stage": "2",
        "zero_optimization.overlap_comm": "true",
        "zero_optimization.offload_optimizer.device": "cpu",
        "micro_batch_size": "8",
        "gradient_accumulation_steps": "2",
        "train_batch_size": "32",
        "slots": "2",
        "zero_stage": "2",
    }


def test_a_trial_has_the_name_of_its_candidate_in_the_study(tmp_path: Path) -> None:
    candidate = Candidate(micro_batch_size=16)
    assert trial(tmp_path, candidate, name="z2-mbs16-no-overlap").name.endswith(" z2-mbs16-no-overlap")
    assert trial(tmp_path / "earlier", candidate).name.endswith(" mbs16")


def test_the_stage_is_the_users_where_a_candidate_sets_none(tmp_path: Path) -> None:
    params = trial(tmp_path, Candidate(micro_batch_size=1)).params
    assert params["zero_stage"] == "1"
    assert "train_batch_size" not in params


def test_metrics_memory_and_phases_arrive_and_steps_have_numbers(tmp_path: Path) -> None:
    content = trial(
        tmp_path,
        Candidate(micro_batch_size=1),
        metrics={"throughput": 12.5},
        memory=Memory(peak=[10, 30], allocator_retries=[0, 1], counted_retries=[0, 2]),
        phases={"steps": 2.0, "end": 1.0},
        step_times=[0.5, 0.25],
        started_at=100.0,
    )
    assert content.metrics == [
        MetricValue("throughput", 12.5),
        MetricValue("samples_per_s", 12.5),
        MetricValue("peak_memory", 30.0),
        MetricValue("allocator_retries", 1.0),
        MetricValue("allocator_retries_counted", 2.0),
        MetricValue("phase.steps", 2.0),
        MetricValue("phase.end", 1.0),
        MetricValue("order", 12.5),
        MetricValue("step_time", 0.5, 0),
        MetricValue("step_time", 0.25, 1),
    ]
    assert content.ended_at == 103.0


def test_what_a_trial_measured_has_units_that_people_read(tmp_path: Path) -> None:
    metrics = {"throughput": 12.5, "forward": 0.0123, "FLOPS_per_gpu": 6.13e10, "loss_first": 5.7}
    paths = StudyPaths(tmp_path).trial(7)
    trial(tmp_path, Candidate(micro_batch_size=1), metrics=metrics, memory=Memory(peak=[10, 434_110_464]))
    content = trial_content(RECORD.model_copy(update={"metric": "forward"}), paths, "parent")
    assert content.tags["mlflow.note.content"] == (
        "forward 12.3 ms, throughput 12.5 samples/s, FLOPS_per_gpu 61.3 GFLOP/s, peak memory 414 MiB"
    )


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (Outcome.COMPLETED, "FINISHED"),
        (Outcome.OUT_OF_MEMORY, "FAILED"),
        (Outcome.TOO_SLOW, "KILLED"),
        (Outcome.CANCELLED, "KILLED"),
    ],
)
def test_the_outcome_is_a_tag_and_a_status(outcome: Outcome, status: str, tmp_path: Path) -> None:
    content = trial(tmp_path, Candidate(micro_batch_size=1), outcome=outcome, reason="why", versions={"torch": "2"})
    assert content.status == status
    assert content.tags == {
        "mlflow.parentRunId": "parent",
        "study_id": "s-1",
        "record_id": "s-1/0007",
        "trial": "0007",
        "purpose": "search",
        "outcome": outcome.value,
        "measured": "fresh",
        "reason": "why",
        "host": "",
        "config_hash": "abc",
        "mlflow.note.content": "" if outcome is Outcome.COMPLETED else f"**{outcome.value.replace('_', ' ')}:** why",
        "version.torch": "2",
    }


def test_the_devices_of_a_trial_arrive_with_what_made_them_slower(tmp_path: Path) -> None:
    hot = TrialDevice(device="GPU-a", model="H100", clock=1305.0, power_limit=700.0, temperature=88)
    hot = hot.model_copy(update={"held_down": ["its temperature"]})
    company = [Neighbour(pid=7, name="notebook", memory=2**30)]
    cool = TrialDevice(device="GPU-b", model="H100", clock=1980.0, power_limit=650.0, temperature=60, company=company)
    content = trial(tmp_path, Candidate(micro_batch_size=1), devices=[hot, cool])
    named = {name: content.tags[name] for name in ("devices", "held_down", "company")}
    assert named == {"devices": "GPU-a, GPU-b", "held_down": "its temperature", "company": "notebook (7)"}
    assert content.metrics == [
        MetricValue("device_clock", 1305.0),
        MetricValue("device_temperature", 88.0),
        MetricValue("device_power_limit", 650.0),
    ]


def test_long_values_are_cut_and_odd_names_made_plain(tmp_path: Path) -> None:
    params = trial(tmp_path, Candidate(knobs={"a(b)": "x" * 7000}, micro_batch_size=1)).params
    assert len(params["a_b_"]) == 6000
    assert params["a_b_"].endswith("x…")


def test_a_value_that_is_no_number_is_left_out(tmp_path: Path) -> None:
    paths = StudyPaths(tmp_path)
    paths.best_ds_metrics.write_text('{"metrics": {"loss": NaN, "throughput": 3.0}}')
    assert study_content(RECORD, paths).metrics == [
        MetricValue("throughput", 3.0),
        MetricValue("samples_per_s", 3.0),
        MetricValue("order", 4000.0),  # below the answer, above its other trials
    ]


def test_a_study_that_runs_says_so(tmp_path: Path) -> None:
    content = study_content(RECORD, StudyPaths(tmp_path))
    assert content.status == "RUNNING"
    assert content.ended_at is None
    assert content.params["settings.divisor"] == "2"
    assert content.params["zero_stages"] == "[1, 2]"
    assert content.tags["mlflow.note.content"].startswith("**Status: running.**\n\nThe `asha` search tuned")


def test_what_of_the_profile_is_a_figure_arrives(tmp_path: Path) -> None:
    paths = StudyPaths(tmp_path)
    profile = ModelProfile(
        num_params=10,
        trainable_num_params=4,
        activation_mem_per_gpu=1,
        gpu_mem=1000,
        data_parallel_size=1,
        flops_per_sample=2.0,
        uncounted=["flash_attn::_flash_attn_forward"],
        bytes_per_param=None,
    )
    result = TrialResult(trial_id="s-0", number=0, purpose=Purpose.PROFILE, config_hash="0", outcome=Outcome.COMPLETED)
    known = KnownTrials(profile, (Candidate(micro_batch_size=1, slots=1), result), {})
    paths.profile.write_text(
        estimate_report(known, 1, "cuda", StudyArguments(command=("a",), model_dir=tmp_path)).model_dump_json()
    )
    found = {point.name: point.value for point in study_content(RECORD, paths).metrics}
    assert (found["profile.num_params"], found["profile.flops_per_sample"]) == (10.0, 2.0)
    assert "profile.z3.states" in found
    assert not {"profile.uncounted", "profile.bytes_per_param"} & found.keys()


@pytest.mark.parametrize(
    ("gain", "finding", "said"),
    [
        (None, "", "There is no measurement of your configuration, so there is no gain to state."),
        (1.5, "It is faster.", "It is faster."),
    ],
)
def test_the_description_begins_with_the_answer_and_holds_what_it_measured_and_the_command(
    gain: float | None, finding: str, said: str, tmp_path: Path
) -> None:
    paths = StudyPaths(tmp_path)
    measured = {"throughput": 12.5, "FLOPS_per_gpu": 6.13e10, "latency": 0.583, "step": 0.1}
    paths.best_ds_metrics.write_text(json.dumps({"metrics": measured}))
    paths.best_command.write_text("deepspeed train.py\n")
    ended = RECORD.model_copy(
        update={
            "status": StudyStatus.COMPLETED,
            "best_number": 3,
            "gain": gain,
            "finding": finding,
            "ended_at": 9.0,
        }
    )
    content = study_content(ended, paths)
    description = content.tags["mlflow.note.content"]
    assert description.startswith(
        f"**{said}**\n\nTrial 0003: throughput 12.5 samples/s, FLOPS_per_gpu 61.3 GFLOP/s, latency 583.0 ms.\n\n"
    )
    assert "deepspeed train.py" in description
    assert content.status == "FINISHED"
    assert paths.best_command not in content.artifacts


def test_the_description_says_what_was_tuned_and_what_the_winner_changes(tmp_path: Path) -> None:
    paths = StudyPaths(tmp_path)
    paths.experiment.write_text("entrypoint: deepspeed train.py --lr 1\n")
    paths.best_ds_metrics.write_text(json.dumps({"metrics": {"throughput": 12.5}}))
    paths.best_command.write_text("deepspeed train.py\n")
    best = {"zero_optimization": {"stage": 2}, "train_batch_size": 8}
    paths.best_ds_config.write_text(json.dumps(best))
    record = RECORD.model_copy(update={"best_number": 3, "model_dir": "/code"})
    description = study_content(record, paths).tags["mlflow.note.content"]
    assert "for `throughput` (samples/s): `deepspeed train.py --lr 1` in `/code`." in description
    assert "| setting | yours | winner |\n|---|---|---|\n| zero_optimization.stage | 1 | 2 |" in description
    assert "| train_batch_size |  | 8 |" in description


def test_the_report_and_its_figures_are_artifacts(tmp_path: Path) -> None:
    paths = StudyPaths(tmp_path)
    paths.figures.mkdir()
    files = [paths.report, paths.figures / "knobs.html", paths.figures / "memory.html"]
    for file in files:
        file.write_text("<html>")
    assert study_content(RECORD, paths).artifacts == files


def test_a_knob_that_a_candidate_leaves_to_the_user_is_an_axis_as_well(tmp_path: Path) -> None:
    base = {"zero_optimization": {"stage": 1, "overlap_comm": True}, "train_micro_batch_size_per_gpu": 2}
    paths = StudyPaths(tmp_path).trial(7)
    trial(tmp_path, Candidate(micro_batch_size=1))
    params = trial_content(RECORD.model_copy(update={"ds_config": base}), paths, "parent").params
    assert params["zero_optimization.overlap_comm"] == "true"


def test_flatten_keeps_lists_and_empty_sections_whole() -> None:
    assert flatten({"a": {"b": {"c": 1}, "d": [1, {"e": 2}]}, "f": {}}) == {"a.b.c": 1, "a.d": [1, {"e": 2}], "f": {}}


def test_secrets_are_in_no_param_and_in_no_description(tmp_path: Path) -> None:
    paths = FullExperimentPaths(tmp_path)
    hparams = {"lr": 0.1, "wandb": {"api_key": "abc"}, "db": "postgres://me:pw@host/db"}
    record = FullExperimentRecord(experiment_id="e-1", name="hello", hparams=hparams)
    params = full_experiment_content(record, paths, None).params
    assert params["hyperparameters.lr"] == "0.1"
    assert params["hyperparameters.wandb.api_key"] == params["hyperparameters.db"] == "<redacted>"

    study = StudyPaths(tmp_path)
    study.best_ds_metrics.write_text('{"metrics": {"throughput": 2.0}}')
    study.best_command.write_text("deepspeed train.py --api_key abc --note def --lr 1")
    tags = study_content(RECORD.model_copy(update={"best_number": 1}), study).tags
    assert "deepspeed train.py --api_key <redacted> --note <redacted> --lr 1" in tags["mlflow.note.content"]
    failed = RECORD.model_copy(update={"status": StudyStatus.FAILED, "reason": "postgres://me:pw@host/db is away"})
    content = study_content(failed, StudyPaths(tmp_path / "failed"))
    tags = without_secrets(content, KnownSecrets()).tags
    assert tags["reason"] == "<redacted> is away"
    assert "me:pw" not in tags["mlflow.note.content"]


def test_no_log_is_sent(tmp_path: Path) -> None:
    typed = StudyPaths(tmp_path).trial(7).as_typed
    log = str(typed.log(0))
    trial(tmp_path, Candidate(micro_batch_size=1), outcome=Outcome.CRASHED, logs=[log])
    typed.root.mkdir()
    typed.log(0).write_text("its last words")
    paths = StudyPaths(tmp_path).trial(7)
    assert {file.suffix for file in trial_content(RECORD, paths, "parent").artifacts} == {".json"}
