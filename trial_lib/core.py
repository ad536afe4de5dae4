"""Determined's `core`, under the names that training code imports; see `docs/core_api.md`."""

from trial_lib.training.core_api import CheckpointContext as CheckpointContext
from trial_lib.training.core_api import Context as Context
from trial_lib.training.core_api import PreemptContext as PreemptContext
from trial_lib.training.core_api import PreemptMode as PreemptMode
from trial_lib.training.core_api import SearcherContext as SearcherContext
from trial_lib.training.core_api import SearcherOperation as SearcherOperation
from trial_lib.training.core_api import TrainContext as TrainContext
from trial_lib.training.core_api import init as init
from trial_lib.training.distributed import DistributedContext as DistributedContext
