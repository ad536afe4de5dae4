"""Determined's `core`, under the names that training code imports; see `docs/core_api.md`."""

from zerotune.trial_lib.training.core_api import CheckpointContext as CheckpointContext
from zerotune.trial_lib.training.core_api import Context as Context
from zerotune.trial_lib.training.core_api import PreemptContext as PreemptContext
from zerotune.trial_lib.training.core_api import PreemptMode as PreemptMode
from zerotune.trial_lib.training.core_api import SearcherContext as SearcherContext
from zerotune.trial_lib.training.core_api import SearcherOperation as SearcherOperation
from zerotune.trial_lib.training.core_api import TrainContext as TrainContext
from zerotune.trial_lib.training.core_api import init as init
from zerotune.trial_lib.training.distributed import DistributedContext as DistributedContext
