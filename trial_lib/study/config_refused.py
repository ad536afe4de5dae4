"""The user's own DeepSpeed judges their configuration while the servers start.

A refusal ends the command only if DeepSpeed surely gets that file. A program may change in its code what it has read.
Then the refusal is a warning, and the study's first run decides.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zerotune.trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH, without_tuning_keys
from zerotune.trial_lib.deepspeed_config.refusals import Refusal, sentence_of
from zerotune.trial_lib.deepspeed_config.rules import ZERO_KEYS
from zerotune.trial_lib.inputs.program_code import is_handed_over
from zerotune.trial_lib.inputs.read_experiment import Experiment, one_error
from zerotune.trial_lib.launch.outcome import REFUSED
from zerotune.trial_lib.launch.processes.environment_check import Judgement
from zerotune.trial_lib.launch.rank_starter import RankStarter
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.secrets import redact


class ConfigCheck:
    """One question to DeepSpeed, asked once.

    A configuration in the code is judged when its program runs, so nothing is asked here. `log` gets refusals that may
    not apply, and failures of the question itself.
    """

    def __init__(self, experiment: Experiment, starter: RankStarter | None, log: logging.Logger) -> None:
        self._experiment = experiment
        self._starter = starter
        self._log = log
        self._judgement: Judgement | None = None
        self._thread: threading.Thread | None = None
        self.warned = ""  # the refusals that may not apply, in sentences

    def ask(self) -> None:
        """Returns at once, so that other servers can start meanwhile."""
        if self._thread is None and self._starter is not None and self._experiment.ds_config:
            self._thread = threading.Thread(target=self._ask, daemon=True, name="check-config")
            self._thread.start()

    def _ask(self) -> None:
        assert self._starter is not None
        try:
            slots = self._experiment.config.resources.slots_per_trial
            self._judgement = self._starter.check(_judged_part(self._experiment), slots)
        except Exception:  # noqa: BLE001 - the study continues without an answer
            self._log.debug("DeepSpeed was not asked about the configuration", exc_info=True)

    def with_refusal(self, failure: str) -> str:
        """The failure of a profile trial, behind the refusals: it may be their consequence, in other words."""
        return failure if REFUSED in failure else f"{self.warned} {failure}".lstrip()

    def refusal(self) -> InputError | None:
        """Waits for the answer: what the user has to correct; None if DeepSpeed does not object.

        A refusal of a file that the program may change is logged once, as a warning.
        """
        self.ask()
        if self._thread is not None:
            self._thread.join()
        if self._judgement is None or not self._judgement["refusals"]:
            return None
        experiment, errors = self._experiment, refusals_shown(self._experiment, self._judgement)
        if is_handed_over(experiment.entrypoint, experiment.model_dir):
            return one_error(errors, experiment.config_source)
        if not self.warned:
            self.warned = " ".join(map(str, errors))
            self._log.warning(
                "%s Your program still runs, because it may hand DeepSpeed another configuration.", self.warned
            )
        return None


def _judged_part(experiment: Experiment) -> dict[str, Any]:
    # The decided part of the configuration. The command may set the batch.
    config = without_tuning_keys(experiment.ds_config)
    if experiment.config.arg_mappings:
        return {key: value for key, value in config.items() if key not in (TRAIN_BATCH, MICRO_BATCH, ACCUMULATION)}
    return config


def refusals_shown(experiment: Experiment, judgement: Judgement) -> list[InputError]:
    """The refusals of a configuration, as the user reads them."""
    deepspeed, slots = f"DeepSpeed {judgement['deepspeed']}", experiment.config.resources.slots_per_trial
    errors = []
    for refusal in (_shown(Refusal(**each)) for each in judgement["refusals"]):
        what, remedy = sentence_of(refusal, deepspeed, ZERO_KEYS, slots)
        errors.append(InputError(what, where=_place(experiment, refusal.keys), remedy=remedy))
    return errors


def _shown(refusal: Refusal) -> Refusal:
    if len(refusal.keys) > 1:
        return refusal
    (name,) = refusal.keys
    return replace(refusal, value=redact({name.rpartition(".")[2]: refusal.value}).popitem()[1])


def _place(experiment: Experiment, keys: Sequence[str]) -> str:
    # The file of the keys: the experiment's own if it overwrites one of them.
    overwrites = experiment.config.hyperparameters.overwrite_deepspeed_args
    is_overwritten = any(_stands_in(key.split("."), overwrites) for key in keys)
    return experiment.source if is_overwritten else str(experiment.config_source)


def _stands_in(steps: Sequence[str], section: Any) -> bool:
    for step in steps:
        if not isinstance(section, Mapping) or step not in section:
            return False
        section = section[step]
    return True
