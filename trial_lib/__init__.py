"""Everything ZeroTune knows, apart from the order of work: it imports neither flows, tasks nor Prefect.

Training code finds the `DeepSpeedTrial` API here, the Core API in `core`, and the helpers of dsat in `dsat`. A name is
imported when it is asked for: the package itself, which the command line imports, brings neither torch nor DeepSpeed.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trial_lib.deepspeed_config.overrides import get_ds_config_from_hparams as get_ds_config_from_hparams
    from trial_lib.deepspeed_config.overrides import overwrite_deepspeed_config as overwrite_deepspeed_config
    from trial_lib.training.context import AttrDict as AttrDict
    from trial_lib.training.context import DeepSpeedTrialContext as DeepSpeedTrialContext
    from trial_lib.training.core_api import LOG_FORMAT as LOG_FORMAT
    from trial_lib.training.core_api import get_cluster_info as get_cluster_info
    from trial_lib.training.data import DataLoader as DataLoader
    from trial_lib.training.data import TorchData as TorchData
    from trial_lib.training.deepspeed_trial import DeepSpeedTrial as DeepSpeedTrial
    from trial_lib.training.deepspeed_trial import PyTorchCallback as PyTorchCallback
    from trial_lib.training.metrics import MetricReducer as MetricReducer
    from trial_lib.training.model_parallel import ModelParallelUnit as ModelParallelUnit
    from trial_lib.training.trainer import Batch as Batch
    from trial_lib.training.trainer import Epoch as Epoch
    from trial_lib.training.trainer import Record as Record
    from trial_lib.training.trainer import Trainer as Trainer
    from trial_lib.training.trainer import init as init

_HOMES = {
    "AttrDict": "trial_lib.training.context",
    "Batch": "trial_lib.training.trainer",
    "DataLoader": "trial_lib.training.data",
    "DeepSpeedTrial": "trial_lib.training.deepspeed_trial",
    "DeepSpeedTrialContext": "trial_lib.training.context",
    "Epoch": "trial_lib.training.trainer",
    "LOG_FORMAT": "trial_lib.training.core_api",
    "MetricReducer": "trial_lib.training.metrics",
    "ModelParallelUnit": "trial_lib.training.model_parallel",
    "PyTorchCallback": "trial_lib.training.deepspeed_trial",
    "Record": "trial_lib.training.trainer",
    "TorchData": "trial_lib.training.data",
    "Trainer": "trial_lib.training.trainer",
    "get_cluster_info": "trial_lib.training.core_api",
    "get_ds_config_from_hparams": "trial_lib.deepspeed_config.overrides",
    "init": "trial_lib.training.trainer",
    "overwrite_deepspeed_config": "trial_lib.deepspeed_config.overrides",
}

_MODULES = ("core", "dsat")

__all__ = [*_HOMES, *_MODULES]


def __getattr__(name: str) -> Any:
    """Returns a name of the API from the module that defines it."""
    if name in _MODULES:
        return importlib.import_module(f"trial_lib.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
