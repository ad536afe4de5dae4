"""Everything ZeroTune knows, apart from the order of work: it imports neither flows, tasks nor Prefect.

Training code finds the `DeepSpeedTrial` API here, the Core API in `core`, and the helpers of dsat in `dsat`. A name is
imported when it is asked for: the package itself, which the command line imports, brings neither torch nor DeepSpeed.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerotune.trial_lib.deepspeed_config.overrides import get_ds_config_from_hparams as get_ds_config_from_hparams
    from zerotune.trial_lib.deepspeed_config.overrides import overwrite_deepspeed_config as overwrite_deepspeed_config
    from zerotune.trial_lib.training.context import AttrDict as AttrDict
    from zerotune.trial_lib.training.context import DeepSpeedTrialContext as DeepSpeedTrialContext
    from zerotune.trial_lib.training.core_api import LOG_FORMAT as LOG_FORMAT
    from zerotune.trial_lib.training.core_api import get_cluster_info as get_cluster_info
    from zerotune.trial_lib.training.data import DataLoader as DataLoader
    from zerotune.trial_lib.training.data import TorchData as TorchData
    from zerotune.trial_lib.training.deepspeed_trial import DeepSpeedTrial as DeepSpeedTrial
    from zerotune.trial_lib.training.deepspeed_trial import PyTorchCallback as PyTorchCallback
    from zerotune.trial_lib.training.metrics import MetricReducer as MetricReducer
    from zerotune.trial_lib.training.model_parallel import ModelParallelUnit as ModelParallelUnit
    from zerotune.trial_lib.training.trainer import Batch as Batch
    from zerotune.trial_lib.training.trainer import Epoch as Epoch
    from zerotune.trial_lib.training.trainer import Record as Record
    from zerotune.trial_lib.training.trainer import Trainer as Trainer
    from zerotune.trial_lib.training.trainer import init as init

_HOMES = {
    "AttrDict": "zerotune.trial_lib.training.context",
    "Batch": "zerotune.trial_lib.training.trainer",
    "DataLoader": "zerotune.trial_lib.training.data",
    "DeepSpeedTrial": "zerotune.trial_lib.training.deepspeed_trial",
    "DeepSpeedTrialContext": "zerotune.trial_lib.training.context",
    "Epoch": "zerotune.trial_lib.training.trainer",
    "LOG_FORMAT": "zerotune.trial_lib.training.core_api",
    "MetricReducer": "zerotune.trial_lib.training.metrics",
    "ModelParallelUnit": "zerotune.trial_lib.training.model_parallel",
    "PyTorchCallback": "zerotune.trial_lib.training.deepspeed_trial",
    "Record": "zerotune.trial_lib.training.trainer",
    "TorchData": "zerotune.trial_lib.training.data",
    "Trainer": "zerotune.trial_lib.training.trainer",
    "get_cluster_info": "zerotune.trial_lib.training.core_api",
    "get_ds_config_from_hparams": "zerotune.trial_lib.deepspeed_config.overrides",
    "init": "zerotune.trial_lib.training.trainer",
    "overwrite_deepspeed_config": "zerotune.trial_lib.deepspeed_config.overrides",
}

_MODULES = ("core", "dsat")

__all__ = [*_HOMES, *_MODULES]

if __name__ == "trial_lib":
    # In the repository, this folder also has the name of the alias.
    importlib.import_module("zerotune.alias")


def __getattr__(name: str) -> Any:
    """Returns a name of the API from the module that defines it."""
    if name in _MODULES:
        return importlib.import_module(f"zerotune.trial_lib.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
