"""What training code imports from the predecessor's `dsat`, under the same names."""

from trial_lib.experiment.overrides import get_ds_config_from_hparams as get_ds_config_from_hparams
from trial_lib.experiment.overrides import overwrite_deepspeed_config as overwrite_deepspeed_config
