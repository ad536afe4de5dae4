"""What a script can ask about the training that it is a rank of: Determined's `get_cluster_info`."""

from dataclasses import dataclass, field
from typing import Any

from trial_lib.training.attr_dict import AttrDict
from trial_lib.wire.training_spec import TrainingSpec, training_spec_of_this_rank

LOG_FORMAT = "%(asctime)s %(levelname)s [%(process)s] %(name)s: %(message)s"
"""For `logging.basicConfig(format=...)`: the process tells the ranks apart."""


@dataclass(frozen=True)
class TrialInfo:
    """One training's own part.

    Attributes:
        hparams: the experiment's hyperparameters, with the DeepSpeed configuration of this training in the place of the
            user's: `deepspeed_config` names its file, and `overwrite_deepspeed_args` holds all of it, for code that
            merges that into a file of its own. Readable as a dict and by attributes.
        trial_seed: the experiment's seed.
    """

    hparams: AttrDict
    trial_seed: int
    _config: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class ClusterInfo:
    """What ZeroTune has told this rank.

    Attributes:
        trial: the training's own part.
        latest_checkpoint: the newest intact checkpoint of an earlier start, for `checkpoint.restore_path`; None where
            the training begins.
        task_type: `TRIAL`, always: a trial that is measured, or a full experiment.
    """

    trial: TrialInfo
    latest_checkpoint: str | None
    task_type: str = "TRIAL"

    @property
    def user_data(self) -> dict[str, Any]:
        """The YAML's `data` section."""
        data: dict[str, Any] = self.trial._config.get("data") or {}
        return data


def get_cluster_info() -> ClusterInfo | None:
    """Returns what ZeroTune has told this rank; None where it runs without ZeroTune."""
    spec = training_spec_of_this_rank()
    return None if spec is None else _info(spec)


def _info(spec: TrainingSpec) -> ClusterInfo:
    trial = TrialInfo(AttrDict(spec.hparams), spec.seed, spec.experiment_config)
    return ClusterInfo(trial, spec.latest_checkpoint)
