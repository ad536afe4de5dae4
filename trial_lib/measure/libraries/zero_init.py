"""`deepspeed.zero.Init` below stage 3, at which engines take no partitioned parameters. There the context does nothing.

Code that makes its model within that context is made for stage 3. Without this, it could be tried at no other stage.
The replacement is made when the program imports DeepSpeed.
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

# Those two check the stage before they use it. DeepSpeed's engine partitions at stage 3 if the code has not. In a sweep
# this replacement finds itself in place.
_BY_STAGE = ("transformers", "accelerate", "deepspeed", "trial_lib")


def install(overrides: Mapping[str, Any], facts: ProgramFacts) -> None:
    """Makes the context follow a candidate. Call it before the user's program runs.

    Args:
        overrides: the candidate's part of the configuration, for every engine that trains. Another engine of stage 3
            partitions its model itself. Overrides without a stage leave the context as it is.
        facts: records that the code partitions its model while it makes it.
    """
    stage = get_knob(overrides, STAGE)
    _when_imported(lambda _: stage, facts)


def adopt(ds_config: Mapping[str, Any], is_in_code: bool) -> None:
    """Makes the context follow a full experiment's configuration.

    Args:
        ds_config: the configuration that the program trains with.
        is_in_code: whether the program's own is in its code. A call with a configuration then follows `ds_config`.
            Otherwise the configuration of a call is that of its engine, which may be another one that only computes.
    """
    stage = get_knob(ds_config, STAGE)
    _when_imported(lambda named: stage if is_in_code or named is None else _stage_of(named), ProgramFacts())


def _stage_of(named: Any) -> Any:
    try:
        config = named if isinstance(named, dict) else read_named_config(str(named), Path(), where="")
    except InputError:
        return None  # DeepSpeed reports the error
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
        """Replaces `deepspeed.zero.Init.__init__`."""
        call = signature.bind(*args, **kwargs)
        caller = str(sys._getframe(1).f_globals.get("__name__", ""))
        if call.arguments.get("enabled", True) and caller.partition(".")[0] not in _BY_STAGE:
            facts.partitions_its_model = True
            named = call.arguments.get("config_dict_or_path") or call.arguments.get("config")
            if stage_for(named) in (0, 1, 2):
                # A module that is passed to it would be partitioned all the same.
                call.arguments.update(enabled=False, module=None)
        original(*call.args, **call.kwargs)

    context.__init__ = init
