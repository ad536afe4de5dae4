"""The files of the answer. The best command is the user's own, if a run of it trains as the winner did."""

import json
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zerotune.trial_lib.deepspeed_config.overrides import (
    ACCUMULATION,
    MICRO_BATCH,
    TRAIN_BATCH,
    with_open_batch,
    without_tuning_keys,
)
from zerotune.trial_lib.inputs.read_experiment import read_experiment
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.files import write_all, write_whole
from zerotune.trial_lib.messages.turned import turned_among
from zerotune.trial_lib.records.folders import OwnCommand, work_dir_of
from zerotune.trial_lib.records.switches import SwitchValue, deepspeed_part
from zerotune.trial_lib.study.code_lines import unpartitioned
from zerotune.trial_lib.study.confirm import Answer
from zerotune.trial_lib.study.driver import StudyDriver
from zerotune.trial_lib.study.followed import joined, typed_before
from zerotune.trial_lib.study.own_command import NoPlaceError, OtherValues, own_commands
from zerotune.trial_lib.study.program import KnownProgram
from zerotune.trial_lib.study.proof import NotProvedError, prove
from zerotune.trial_lib.study.setup import StudySetup
from zerotune.trial_lib.study.training_command import (
    assignments,
    beside,
    left_to_write,
    options_to_remove,
    program_as_typed,
    secrets_first,
    trainer_options,
    training_command,
    typed_environment,
)

_OTHER = "This is not the command that you typed, with its files:"


def write_answer(driver: StudyDriver, answer: Answer) -> None:
    """Writes the winning configuration, its measurements, and the command to train with it.

    That is the user's own command with edited copies of its files, if a short run shows that its engine has the
    configuration of the winner's trials. If not, it is the command that was tuned, and a sentence says why.
    """
    setup, known, paths = driver.setup, driver.known, driver.setup.paths
    winner = driver.state.candidates[answer.best.number]
    config = deepspeed_part(winner.complete(known.base_config))
    write_whole(paths.best_ds_metrics, json.dumps(answer.document(driver), indent=2) + "\n")
    written = with_open_batch(known.in_file(config), known.own_config(setup.experiment))
    write_whole(paths.best_ds_config, json.dumps(written, indent=2) + "\n")
    # An interrupt may end the run of the user's own command.
    tuned = training_command(setup, known, config, winner.switches)
    write_whole(paths.best_command, tuned)
    paths.own_command.unlink(missing_ok=True)
    try:
        own = _proved(driver, answer, config, written)
    except (NoPlaceError, NotProvedError, InputError, TimeoutError) as error:
        why = " ".join(str(error).split()).rstrip(".")
        driver.log.info("the best command is not the one that you typed: %s", why)
        # A sentence about the code says the same.
        if not isinstance(error, NoPlaceError) or not tuned.startswith("#"):
            write_whole(paths.best_command, f"# {_OTHER} {why}.\n{tuned}")
        return
    if own is None:
        return
    write_all({str(paths.own_command): own.model_dump_json(indent=2), str(paths.best_command): own_lines(setup, own)})


def _proved(
    driver: StudyDriver, answer: Answer, config: Mapping[str, Any], written: Mapping[str, Any]
) -> OwnCommand | None:
    # The user's own command, and its copies, as it was seen to train.
    setup, submitted = driver.setup, driver.state.submitted
    winner = driver.state.candidates[answer.best.number]
    failed: NotProvedError | None = None
    for own in own_answers(setup, driver.known, config, winner.switches):
        shutil.rmtree(setup.paths.best, ignore_errors=True)
        write_all(own.copies)
        try:
            if setup.experiment.entrypoint.trial_class is not None:
                _read_again(setup, own, written)
            elif submitted is None or submitted.config_hash != answer.best.config_hash:
                prove(driver, own, winner, answer.best)
        except NotProvedError as error:
            # The likeliest way has the reason that a person understands.
            failed = failed or error
            continue
        return own
    if failed is not None:
        raise failed
    return None


def own_answers(
    setup: StudySetup, known: KnownProgram, config: Mapping[str, Any], switches: Mapping[str, SwitchValue]
) -> Iterator[OwnCommand]:
    """The command that the user typed, with a configuration in its place (`own_commands`). Nothing is written.

    That of a trial class is `zerotune train`. None for an experiment's YAML of a script without a launcher. Raises
    NoPlaceError if the command cannot have all of it, and InputError if a file of it cannot be edited.
    """
    experiment, entrypoint = setup.experiment, setup.experiment.entrypoint
    turned, own = turned_among(switches), known.switches
    offered = () if known.found is None else known.found.trainer_options
    if entrypoint.trial_class is not None and not switches and setup.arguments.config_path is not None:
        folders = (str(setup.arguments.config_path.resolve()), str(experiment.model_dir))
        words: Sequence[str] = (beside(sys.executable, "zerotune"), "train", *folders)
        there = {"folder": str(work_dir_of(setup.paths.root)), "variables": typed_environment(setup)[0]}
        for command in own_commands(experiment, words, known, config, OtherValues(), setup.paths):
            yield command.model_copy(update=there)
    if entrypoint.trial_class is not None or not entrypoint.launcher:
        return
    if left := left_to_write(turned, own, offered):
        raise NoPlaceError(f"{next(iter(left))} is set in the code")
    if unpartitioned(known, config):
        raise NoPlaceError("deepspeed.zero.Init is in the code")
    values = OtherValues(switches, trainer_options(turned, own, offered), options_to_remove(turned, own, offered))
    words = entrypoint.wrapper or (*program_as_typed(experiment), *entrypoint.arguments)
    variables = typed_environment(setup)[0]
    if entrypoint.wrapper:
        by_wrapper = entrypoint.environment
        variables = {name: value for name, value in variables.items() if by_wrapper.get(name) != value}
        variables = {**typed_before(str(entrypoint.slots)), **variables}
    for command in own_commands(experiment, words, known, config, values, setup.paths):
        yield command.model_copy(update={"variables": {**variables, **command.variables}})


def _read_again(setup: StudySetup, own: OwnCommand, wanted: Mapping[str, Any]) -> None:
    # A trial class has the configuration from its YAML, as every tool here reads it.
    found = without_tuning_keys(read_experiment(Path(own.words[2]), setup.experiment.model_dir).ds_config)
    sizes = (MICRO_BATCH, ACCUMULATION, TRAIN_BATCH)
    same = [{key: value for key, value in each.items() if key not in sizes or key in found} for each in (found, wanted)]
    if same[0] != same[1]:
        raise NotProvedError(f"its configuration is {json.dumps(found)}")


def own_lines(setup: StudySetup, command: OwnCommand) -> str:
    """The text of a file that starts this command."""
    secrets = typed_environment(setup)[1]
    typed = f"{assignments(command.variables)}{joined(command.words)}"
    lines = [*secrets_first(secrets), f"cd {shlex.quote(command.folder)}", typed]
    return "\n".join(lines) + "\n"
