"""The training that a script is a rank of: Determined's `get_cluster_info`."""

from dataclasses import dataclass, field
from typing import Any

from trial_lib.training.attr_dict import AttrDict
from trial_lib.wire.training_spec import TrainingSpec, training_spec_of_this_rank

LOG_FORMAT = "%(asctime)s %(levelname)s [%(process)s] %(name)s: %(message)s"
"""For `logging.basicConfig(format=...)`. The process number distinguishes the ranks."""


@dataclass(frozen=True)
class TrialInfo:
    """One training.

    Attributes:
        hparams: the experiment's hyperparameters with the DeepSpeed configuration of this training instead of the
            user's. `deepspeed_config` names its file. `overwrite_deepspeed_args` holds all of it, for code that merges
            it into a file of its own. They have keys and attributes.
        trial_seed: the experiment's seed.
    """

    hparams: AttrDict
    trial_seed: int
    _config: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class ClusterInfo:
    """ZeroTune's information for this rank.

    Attributes:
        trial: the training.
        latest_checkpoint: the newest intact checkpoint of an earlier start, for `checkpoint.restore_path`; None if the
            training begins.
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
    """Returns ZeroTune's information for this rank; None without ZeroTune."""
    spec = training_spec_of_this_rank()
    return None if spec is None else _info(spec)


def _info(spec: TrainingSpec) -> ClusterInfo:
    trial = TrialInfo(AttrDict(spec.hparams), spec.seed, spec.experiment_config)
    return ClusterInfo(trial, spec.latest_checkpoint)
