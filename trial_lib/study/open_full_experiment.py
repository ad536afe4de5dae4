"""Opens a full experiment: a new one, one to resume, or that of a study."""

import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerotune.trial_lib.deepspeed_config.overrides import (
    CONFIG,
    OVERWRITES,
    is_programs_own_name,
    overwrite_deepspeed_config,
    read_deepspeed_json,
    read_named_config,
    without_tuning_keys,
)
from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.device.this_host import kind_of
from zerotune.trial_lib.inputs.known_secrets import KnownSecrets, keep_secret, known_here
from zerotune.trial_lib.inputs.places import in_wrapper
from zerotune.trial_lib.inputs.read_experiment import Experiment, read_experiment
from zerotune.trial_lib.launch.full_training import TrainingPlan
from zerotune.trial_lib.launch.hosts import HostfileStarter
from zerotune.trial_lib.launch.locks import host_lock_dir
from zerotune.trial_lib.launch.outcome import REFUSED
from zerotune.trial_lib.launch.starters import ColdStarter
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.files import OWNERS_FOLDER, write_all, write_whole
from zerotune.trial_lib.records.folders import (
    FULL_EXPERIMENTS,
    DrivenFolder,
    FullExperimentPaths,
    FullExperimentRecord,
    StudyStatus,
    full_experiment_id,
    work_dir_of,
)
from zerotune.trial_lib.records.switches import shown_switch, switches_of
from zerotune.trial_lib.study.confirm import answer_of
from zerotune.trial_lib.study.folder import (
    FinishedError,
    as_kept,
    keep_experiment,
    new_folder,
    new_id,
    provenance,
    read_run_record,
    read_wrapper,
    with_own_id,
    write_wrapper,
)
from zerotune.trial_lib.study.full_experiment import FullExperiment, TrainingArguments
from zerotune.trial_lib.study.limits import own_ops
from zerotune.trial_lib.study.open_study import OpenStudy
from zerotune.trial_lib.study.plans import full_length_spec
from zerotune.trial_lib.study.program import environment_of, program_of
from zerotune.trial_lib.study.run import hold_folder
from zerotune.trial_lib.study.setup import check_include, check_length, check_slots, slots_for
from zerotune.trial_lib.tracking.tracking_uri import default_tracking_uri


def new_full_experiment(arguments: TrainingArguments, work_dir: Path, flow_run_id: str | None = None) -> FullExperiment:
    """Raises InputError if the arguments, the experiment or this host do not fit. Nothing was written then."""
    experiment, ds_config, host, environment = _checked(arguments, arguments.config_path)
    tracking_uri = default_tracking_uri(work_dir)
    experiment_id = new_id(known_here().hide(experiment.name))
    paths = FullExperimentPaths((work_dir / FULL_EXPERIMENTS / experiment_id).absolute())
    new_folder(paths.root, "full experiment", experiment, paths.experiment)
    record = _new_record(experiment_id, experiment, ds_config, arguments, study_id=None)
    record = record.model_copy(update={"flow_run_id": flow_run_id})
    return _open(record, experiment, environment, host, paths, tracking_uri)


def resume_newest(arguments: TrainingArguments, work_dir: Path) -> FullExperiment:
    """Resumes the newest full experiment of the same name that has not completed.

    The YAML as it is now counts. Only the DeepSpeed configuration must be the same, unless DeepSpeed has refused it.
    Without one in the arguments, the one of the beginning counts. Raises InputError if there is no such full
    experiment, another process drives it, or something does not fit.
    """
    named = _read_experiment(arguments, arguments.config_path)
    paths, record = _newest(named.name, work_dir)
    if arguments.ds_config is None:
        before = TrainingArguments.model_validate(record.arguments)
        arguments = arguments.model_copy(update={"ds_config": before.ds_config})
    experiment, ds_config, host, environment = _checked(arguments, arguments.config_path)
    if not record.reason.startswith(REFUSED):
        _refuse_change(record, ds_config, paths)
    now = {"arguments": as_kept(arguments), "hparams": _own_hparams(experiment), "ds_config": ds_config}
    record = record.model_copy(update={**now, "status": StudyStatus.RUNNING})
    opened = _open(record, experiment, environment, host, paths, default_tracking_uri(work_dir))
    keep_experiment(experiment, paths.experiment)
    return opened


def resume_full_experiment(root: Path) -> FullExperiment:
    """Raises FinishedError if it has completed, InputError if it cannot be resumed."""
    paths = FullExperimentPaths(root.absolute())
    record = _read_record(paths)
    if record.status is StudyStatus.COMPLETED:
        raise FinishedError(
            "this full experiment has come to its end.",
            where=str(root),
            remedy=f"Its checkpoints are in {paths.checkpoints.name} there. Start a new one to train again.",
        )
    arguments = TrainingArguments.model_validate(record.arguments)
    experiment, ds_config, host, environment = _checked(arguments, paths.experiment)
    _refuse_change(record, ds_config, paths)
    return _open(record, experiment, environment, host, paths, default_tracking_uri(work_dir_of(paths.root)))


def full_experiment_of(study: OpenStudy) -> FullExperiment | None:
    """The full experiment of a study with an answer; None if it has already ended."""
    paths = FullExperimentPaths(study.paths.full_experiment.root)
    driver = study.driver
    # Also those that the profile trial found, because a full experiment has no profile.
    submitted, environment, include = driver.setup.experiment, driver.setup.environment, driver.setup.arguments.include
    config_path, known = study.paths.experiment, driver.known.arg_mappings
    if study.paths.best_experiment.exists():
        # Its command has what a wrapper made of the wrapper's own files.
        typed = submitted.entrypoint
        of_wrapper = in_wrapper(known, typed.arguments, typed.wrapper, submitted.model_dir)
        known = {key: target for key, target in known.items() if key not in of_wrapper}
        config_path = study.paths.best_experiment
        submitted = read_experiment(config_path, submitted.model_dir, include=include)
        environment = environment_of(submitted, include, driver.setup.device)
    # What the command's own mappings set goes before what the profile trial has found.
    own = {str(key): target for key, target in submitted.config.arg_mappings.items()}
    mappings = {**known, **own}
    experiment = dataclasses.replace(submitted, config=submitted.config.model_copy(update={"arg_mappings": mappings}))
    check_length(experiment)
    # It goes on from an earlier attempt, or begins.
    ds_config = json.loads(study.paths.best_ds_config.read_text())
    if paths.record.exists():
        record = _read_record(paths)
        if record.status is StudyStatus.COMPLETED:
            return None
        _refuse_change(record, ds_config, paths)
        # A copied study has another id, and so has its training.
        record = record.of_study(study.record.study_id)
    else:
        paths.root.mkdir(mode=OWNERS_FOLDER, exist_ok=True)
        keep_experiment(experiment, paths.experiment)
        arguments = TrainingArguments(
            config_path=config_path,
            model_dir=experiment.model_dir,
            ds_config=study.paths.best_ds_config,
            include=include,
        )
        study_id = study.record.study_id
        record = _new_record(full_experiment_id(study_id), experiment, ds_config, arguments, study_id)
    tracking_uri = default_tracking_uri(work_dir_of(study.paths.root))
    opened = _open(record, experiment, environment, driver.setup.host, paths, tracking_uri)
    opened.log.parent = driver.log  # the study's log and its live view show it as well
    if switches := _winners_switches(study):
        opened.log.info("The training has the winner's switches of your program: %s.", ", ".join(switches))
    return opened


def _winners_switches(study: OpenStudy) -> list[str]:
    answer, driver = answer_of(study.driver), study.driver
    if answer is None:
        return []
    typed = switches_of(driver.known.base_config)
    winner = driver.state.candidates[answer.best.number].switches
    return [shown_switch(place, value) for place, value in winner.items() if typed.get(place) != value]


def read_full_experiment(study: OpenStudy) -> FullExperimentRecord | None:
    """The record of a study's full experiment; None without one."""
    paths = FullExperimentPaths(study.paths.full_experiment.root)
    return _read_record(paths) if paths.record.exists() else None


def _checked(
    arguments: TrainingArguments, config_path: Path
) -> tuple[Experiment, dict[str, Any], Host, dict[str, str]]:
    # The experiment with its complete DeepSpeed configuration, this host, and the environment of its ranks.
    experiment = _read_experiment(arguments, config_path)
    keep_secret(KnownSecrets.of_experiment(experiment))
    host = slots_for(experiment)
    check_slots(experiment, host)
    experiment = dataclasses.replace(experiment, notes=(*experiment.notes, *host.notes))
    check_include(arguments.include)
    check_length(experiment)
    base = experiment.ds_config
    named = experiment.entrypoint.config_values
    if not base and named and not is_programs_own_name(named[0], experiment.model_dir, experiment.entrypoint.script):
        base = read_named_config(named[0], experiment.model_dir, where=experiment.source)
    merged = {} if arguments.ds_config is None else _read_ds_config(arguments.ds_config)
    config = without_tuning_keys(overwrite_deepspeed_config(base, merged))
    keep_secret(KnownSecrets.within(config))
    return experiment, config, host, environment_of(experiment, arguments.include, host.device)


def _read_experiment(arguments: TrainingArguments, config_path: Path) -> Experiment:
    folder = DrivenFolder(config_path.parent)
    # The experiment of a study may name files that only the words that were typed for it have.
    wrapper = read_wrapper(folder) if folder.lock.exists() else ()
    include = arguments.include
    return read_experiment(config_path, arguments.model_dir, include=include, needs_ds_config=False, wrapper=wrapper)


def _read_ds_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(
            "this file does not exist.",
            where=f"--ds-config {path}",
            remedy="Name a DeepSpeed configuration, such as a study's best_ds_config.json.",
        )
    try:
        return read_deepspeed_json(path)
    except InputError as error:
        raise InputError(error.what, where=error.where, remedy=f"{error.remedy} --ds-config names it.") from None


def _refuse_change(record: FullExperimentRecord, ds_config: Mapping[str, Any], paths: FullExperimentPaths) -> None:
    if ds_config != record.ds_config:
        raise InputError(
            "the DeepSpeed configuration has changed since the full experiment began.",
            where=str(paths.root),
            remedy="Put it back, or start a new full experiment, without --resume.",
        )


def _newest(name: str, work_dir: Path) -> tuple[FullExperimentPaths, FullExperimentRecord]:
    found: list[tuple[tuple[float, bool], FullExperimentPaths, FullExperimentRecord]] = []
    for file in (work_dir / FULL_EXPERIMENTS).absolute().glob("*/record.json"):
        paths = FullExperimentPaths(file.parent)
        record = _read_record(paths)
        if record.name == name and record.status is not StudyStatus.COMPLETED:
            is_own = not with_own_id(record, file, resumes=False)[1]
            found.append(((record.started_at, is_own), paths, record))
    if not found:
        raise InputError(
            f"there is no unfinished full experiment named {name} here.",
            where=str(work_dir / FULL_EXPERIMENTS),
            remedy="Leave --resume out to start one, or run zerotune in the folder where it was started. Resume "
            "a study's by `zerotune resume STUDY`.",
        )
    _, paths, record = max(found, key=lambda one: one[0])
    return paths, record


def _read_record(paths: FullExperimentPaths) -> FullExperimentRecord:
    remedy = "Move its folder away, or start a new full experiment."
    return read_run_record(paths, FullExperimentRecord, remedy)


def _new_record(
    experiment_id: str,
    experiment: Experiment,
    ds_config: dict[str, Any],
    arguments: TrainingArguments,
    study_id: str | None,
) -> FullExperimentRecord:
    return FullExperimentRecord(
        experiment_id=experiment_id,
        name=experiment.name,
        study_id=study_id,
        model_dir=str(experiment.model_dir),
        **provenance(experiment.model_dir),
        ds_config=ds_config,
        hparams=_own_hparams(experiment),
        arguments=as_kept(arguments),
        started_at=time.time(),
    )


def _own_hparams(experiment: Experiment) -> dict[str, Any]:
    hparams = experiment.config.hyperparameters.as_dict()
    inline = {} if CONFIG in hparams else experiment.ds_config
    return {key: value for key, value in hparams.items() if key not in (CONFIG, OVERWRITES) and key not in inline}


def _open(
    record: FullExperimentRecord,
    experiment: Experiment,
    environment: dict[str, str],
    host: Host,
    paths: FullExperimentPaths,
    tracking_uri: str,
) -> FullExperiment:
    held = hold_folder(paths, record, tracking_uri, may_be_copy=record.study_id is None)
    write_wrapper(paths, experiment.entrypoint.wrapper)
    write_whole(paths.ds_config, json.dumps(record.ds_config, indent=2) + "\n")
    if held.copied:
        held.log.warning("%s", held.copied)
        experiment = dataclasses.replace(experiment, notes=(held.copied, *experiment.notes))
    spec = full_length_spec(experiment, record.ds_config, paths)
    entrypoint = experiment.entrypoint
    is_in_code = entrypoint.trial_class is None and not entrypoint.config_values and not experiment.ds_config
    plan = TrainingPlan(
        program=program_of(
            experiment,
            environment,
            paths.ds_config,
            record.ds_config,
            paths.training_spec,
            as_typed=not record.ds_config,
        ),
        slots=experiment.config.resources.slots_per_trial,
        paths=paths,
        max_restarts=experiment.config.max_restarts,
        ds_config=record.ds_config,
        is_in_code=is_in_code and bool(record.ds_config),
        turned=dict(experiment.config.turned),
    )
    write_all(plan.program.files)
    trained = dataclasses.replace(experiment, ds_config=record.ds_config)
    shown = {**environment, **kind_of(host.device).primed_with(host, plan.slots)}
    start = (plan.program.interpreter, own_ops(trained, host.device), shown, held.log.info)
    hosts = experiment.config.resources.hosts
    starter = HostfileStarter(hosts, *start) if hosts else ColdStarter(*start)
    return FullExperiment(held, experiment, plan, spec, starter, host, host_lock_dir())
