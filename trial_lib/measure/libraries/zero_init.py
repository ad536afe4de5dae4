"""`deepspeed.zero.Init` below stage 3, whose engines take no partitioned parameters: there it does nothing.

Code that makes its model within that context is made for stage 3, and could be tried at no other. It is put in place
when the program imports DeepSpeed.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from trial_lib.deepspeed_config.deepspeed_json import read_named_config
from trial_lib.intercept.post_import import when_imported
from trial_lib.measure.program_facts import ProgramFacts
from trial_lib.space.knobs import STAGE, get_knob
from trial_lib.wire.errors import InputError

# Those ask for the stage before they use it, DeepSpeed's engine does at stage 3 what the code has not done, and in a
# sweep this stands in for itself.
_BY_STAGE = ("transformers", "accelerate", "deepspeed", "trial_lib")


def install(overrides: Mapping[str, Any], facts: ProgramFacts) -> None:
    """Has the context follow a candidate; before the user's program runs.

    Args:
        overrides: the candidate's part of the configuration, which every engine that trains gets (another one of stage
            3 partitions its model itself); one that names no stage leaves the context as it is.
        facts: is told that the code partitions its model while it makes it.
    """
    stage = get_knob(overrides, STAGE)
    _when_imported(lambda _: stage, facts)


def adopt(ds_config: Mapping[str, Any], is_in_code: bool) -> None:
    """Has the context follow a full experiment's configuration.

    Args:
        ds_config: what the program trains with.
        is_in_code: whether the program's own stands in its code: then a call that names that follows `ds_config`. Else
            what a call names is what its engine gets, such as another one's that only computes.
    """
    stage = get_knob(ds_config, STAGE)
    _when_imported(lambda named: stage if is_in_code or named is None else _stage_of(named), ProgramFacts())


def _stage_of(named: Any) -> Any:
    try:
        config = named if isinstance(named, dict) else read_named_config(str(named), Path(), where="")
    except InputError:
        return None  # DeepSpeed says what is wrong with it
    return get_knob(config, STAGE, 0)


def _when_imported(stage_for: Callable[[Any], Any], facts: ProgramFacts) -> None:
    call = functools.partial(_follow_stage, stage_for, facts)
    when_imported("deepspeed.runtime.zero.partition_parameters", call)


def _follow_stage(stage_for: Callable[[Any], Any], facts: ProgramFacts, module: ModuleType) -> None:
    context: Any = module.Init
    original = context.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        """Stands in for `deepspeed.zero.Init.__init__`."""
        call = signature.bind(*args, **kwargs)
        caller = str(sys._getframe(1).f_globals.get("__name__", ""))
        if call.arguments.get("enabled", True) and caller.partition(".")[0] not in _BY_STAGE:
            facts.partitions_its_model = True
            named = call.arguments.get("config_dict_or_path") or call.arguments.get("config")
            if stage_for(named) in (0, 1, 2):
                # A module that it is given would be partitioned all the same.
                call.arguments.update(enabled=False, module=None)
        original(*call.args, **call.kwargs)

    context.__init__ = init
