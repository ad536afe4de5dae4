"""`deepspeed.zero.Init` below stage 3, whose engines take no partitioned parameters: there it does nothing.

Code that makes its model within that context is made for stage 3, and could be tried at no other. It is put in place
when the program imports DeepSpeed.
"""

import functools
import inspect
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from trial_lib.experiment.knobs import STAGE, get_knob
from trial_lib.measure.post_import import when_imported
from trial_lib.measure.program_facts import ProgramFacts

# They ask for the stage before they use it.
_BY_STAGE = ("transformers", "accelerate")


def install(config: Mapping[str, Any], facts: ProgramFacts) -> None:
    """Has the context follow the stage; before the user's program runs.

    Args:
        config: DeepSpeed's, or a candidate's part of it; one that names no stage leaves the context as it is.
        facts: is told that the code partitions its model while it makes it.
    """
    stage = get_knob(config, STAGE)
    when_imported("deepspeed.runtime.zero.partition_parameters", functools.partial(_follow_stage, stage, facts))


def _follow_stage(stage: Any, facts: ProgramFacts, module: ModuleType) -> None:
    context: Any = module.Init
    original = context.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        """Stands in for `deepspeed.zero.Init.__init__`."""
        call = signature.bind(*args, **kwargs)
        if call.arguments.get("enabled", True):
            caller = str(sys._getframe(1).f_globals.get("__name__", ""))
            facts.partitions_its_model |= caller.partition(".")[0] not in _BY_STAGE
            if stage in (0, 1, 2):
                call.arguments["enabled"] = False
        original(*call.args, **call.kwargs)

    context.__init__ = init
