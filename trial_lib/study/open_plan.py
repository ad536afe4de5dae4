"""Opening a plan: its experiment, the devices that it is for, and its folder."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from zerotune.trial_lib.deepspeed_config.overrides import (
    TRAIN_BATCH,
    without_tuning_keys,
)
from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.device.this_host import this_host
from zerotune.trial_lib.inputs.known_secrets import KnownSecrets, keep_secret, known_here
from zerotune.trial_lib.inputs.read_experiment import Experiment, read_experiment
from zerotune.trial_lib.launch.rank_starter import Program
from zerotune.trial_lib.messages.files import make_own_folder, write_all, write_whole
from zerotune.trial_lib.plan.arms import check_count
from zerotune.trial_lib.plan.device_memory import AllocatorSettings
from zerotune.trial_lib.plan.devices import (
    AskedDevices,
    known_devices,
    own_devices,
    read_devices,
    read_price_file,
    read_prices,
)
from zerotune.trial_lib.plan.plan_record import PlanArguments, PlanPaths
from zerotune.trial_lib.records.folders import PLANS, StudyPaths, TrialPaths
from zerotune.trial_lib.records.switches import deepspeed_part, switches_of
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.folder import new_folder, new_id
from zerotune.trial_lib.study.followed import followed
from zerotune.trial_lib.study.plans import trial_spec
from zerotune.trial_lib.study.program import KnownProgram, environment_of, program_of, typed_switches
from zerotune.trial_lib.study.setup import StudySetup, check_include
from zerotune.trial_lib.study.typed_command import on_ranks, read_command, started_on

DEVICE = "cuda"  # the kind of all devices that can be foreseen
_OF_LIST = 8  # devices of each kind in a list of prices, if nothing else is asked for


@dataclass(frozen=True)
class ReadPlan:
    """A plan that can begin. Nothing of it has been written."""

    arguments: PlanArguments  # of the plan. A wrapper's command is replaced by the command that it starts.
    experiment: Experiment  # what is planned
    asked: tuple[AskedDevices, ...]  # the devices
    notes: tuple[str, ...] = ()  # sentences for the user

    @property
    def base_config(self) -> dict[str, Any]:
        """As the user wrote it; empty if it is in the code."""
        return without_tuning_keys(self.experiment.ds_config)


def read_plan(
    arguments: PlanArguments,
    tell: Callable[[str], None] = lambda sentence: None,
    check: Callable[[], None] = lambda: None,
) -> ReadPlan:
    """Checks the arguments of a plan. Raises InputError if the devices, the command or the experiment are wrong.

    `tell` gets a sentence when something takes long. `check` is called repeatedly meanwhile, and its error ends the
    waiting.
    """
    known = known_devices(arguments.devices)
    listed = {} if arguments.prices is None else read_price_file(arguments.prices, known)
    on = arguments.on or tuple(f"{name}:{min(_OF_LIST, known[name].per_host)}" for name in listed)
    if on:
        asked = read_devices(on, arguments.price, known, listed)
    else:
        asked = (own_devices(this_host(), known, read_prices(arguments.price, known)),)
    check_include(arguments.include)
    notes: tuple[str, ...] = ()
    if arguments.config_path is not None:
        experiment = read_experiment(arguments.config_path, arguments.model_dir, include=arguments.include)
    else:
        found = followed(arguments.command, arguments.model_dir, tell, check, arguments.arg_mappings.values())
        arguments = arguments.model_copy(update={"command": found.words, "model_dir": found.folder})
        notes = found.notes
        mappings, include, vary = arguments.arg_mappings, arguments.include, arguments.vary
        experiment = read_command(arguments.command, mappings, arguments.model_dir, None, include, vary, found.wrapper)
    config = {**experiment.ds_config}
    if arguments.train_batch_size is not None:
        config[TRAIN_BATCH] = arguments.train_batch_size
    elif arguments.free_batch:
        config.pop(TRAIN_BATCH, None)
    for each in asked:
        check_count(config, each.count, f"--on {each.cluster}")
    keep_secret(KnownSecrets.of_experiment(experiment) + KnownSecrets.within({"command": arguments.command}))
    return ReadPlan(arguments, experiment, asked, (*notes, *experiment.notes))


@dataclass(frozen=True)
class OpenPlan:
    plan_id: str  # unique on this and other machines
    read: ReadPlan  # what is planned
    paths: PlanPaths  # its files
    scratch: Path  # a folder for its runs, which is removed at its end
    environment: dict[str, str]  # of the runs
    started_at: float  # seconds since the epoch
    began_at: float  # the same by the monotonic clock

    @property
    def allocator(self) -> AllocatorSettings:
        return AllocatorSettings.of_environment(self.environment)

    @cached_property
    def switches(self) -> dict[str, Any]:
        """The varied switches in the command as typed, by their places."""
        return typed_switches(self.read.experiment, self.environment)

    def program(self, name: str, count: int, config: Mapping[str, Any], known: KnownProgram) -> Program:
        """Returns the user's program for one run, and writes the files that it reads.

        `config` is the complete DeepSpeed configuration, with the program's switches in the section `program`. If it is
        empty, the program runs as typed.
        """
        complete, paths = deepspeed_part(config) or self.read.base_config, TrialPaths(self.scratch / name)
        experiment, known = on_ranks(self.read.experiment, count), known.on_ranks(count)
        make_own_folder(paths.root)
        program = program_of(
            experiment,
            self.environment,
            paths.ds_config,
            known.in_words(complete),
            paths.training_spec,
            known.arg_mappings,
            as_typed=not config,
            switches=switches_of(config),
        )
        write_whole(paths.ds_config, json.dumps(complete, indent=2))
        write_all(program.files)
        trial_spec(experiment, complete, paths).write(paths.training_spec)
        return program

    def setup(self, asked: AskedDevices) -> StudySetup:
        """As the writer of the best command takes it."""
        arguments = self.read.arguments
        slots = [str(index) for index in range(asked.cluster.per_host)]
        return StudySetup(
            study_id=self.plan_id,
            opened_at=self.started_at,
            experiment=started_on(
                on_ranks(self.read.experiment, asked.cluster.per_host), asked.count, asked.cluster.hosts
            ),
            arguments=StudyArguments(
                config_path=arguments.config_path, command=arguments.command, model_dir=arguments.model_dir
            ),
            paths=StudyPaths(self.paths.root),
            host=Host(DEVICE, slots, int(asked.cluster.device.memory)),
            environment=self.environment,
        )


def open_plan(read: ReadPlan, work_dir: Path, scratch: Path) -> OpenPlan:
    """Makes the folder of a plan. Raises InputError if it cannot, or the allocator's settings cannot be read."""
    experiment = read.experiment
    environment = environment_of(experiment, read.arguments.include, DEVICE)
    # A wrong variable is found before there is a folder.
    AllocatorSettings.of_environment(environment)
    arguments = read.arguments
    # A program that was written for a model is in the folder already.
    plan_id = arguments.model_dir.parent.name if arguments.model else new_id(known_here().hide(experiment.name))
    paths = PlanPaths((work_dir / PLANS / plan_id).absolute())
    new_folder(paths.runs, "plan", experiment, paths.experiment)
    return OpenPlan(plan_id, read, paths, scratch, environment, time.time(), time.monotonic())
