"""Replaces DeepSpeed's own functions before the user's code runs, however the code calls them."""

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from trial_lib.deepspeed_config.deepspeed_json import read_named_config
from trial_lib.deepspeed_config.overrides import TRAIN_BATCH, DeepSpeedConfig, difference, overwrite_deepspeed_config
from trial_lib.device.rank import expected
from trial_lib.intercept.stand_in import stand_in
from trial_lib.measure.ends.config_refusal import keys_named
from trial_lib.measure.engine_roles import Followers, trains
from trial_lib.measure.libraries import engine_checkpoints
from trial_lib.measure.libraries.direct_steps import DirectSteps
from trial_lib.measure.program_facts import ProgramFacts
from trial_lib.turned.turning import Turning
from trial_lib.wire.errors import InputError

# Sections that make DeepSpeed write to a place, or an account, of the user's; and DeepSpeed's own tuner.
_ELSEWHERE = ("tensorboard", "wandb", "csv_monitor", "comet", "autotuning")
_CHECKPOINTING = "activation_checkpointing"
_CHECKPOINTING_BY_CODE = ("partition_activations", "contiguous_checkpointing", "num_checkpoints", "checkpoint_in_cpu")


_LIGHTNING = re.compile(r"(lightning\.pytorch|pytorch_lightning)\.")


class InitializeObserver(Protocol):
    """The receiver of events about the engines that the user's code builds."""

    @property
    def has_engine(self) -> bool:
        """Whether this run of the code has built an engine that trains."""

    def initialize_called(self) -> None:
        """Called when `deepspeed.initialize` begins."""

    def engine_built(self, engine: Any) -> None:
        """Called with each engine that trains."""

    def frozen_engine_built(self) -> None:
        """Called when an engine that does not train exists."""

    def group_destroyed(self) -> None:
        """Called before the code destroys the process group. Afterwards the ranks cannot agree any more."""


def intercept(
    overrides: Mapping[str, Any],
    facts: ProgramFacts,
    observer: InitializeObserver,
    turned: Mapping[str, Any] | None = None,
) -> None:
    """Makes `deepspeed.initialize` merge the overrides in for engines that train, and keeps checkpoints as they are.

    Args:
        overrides: a candidate's part of the DeepSpeed configuration.
        facts: collects the configuration that the code itself passes for the first engine that trains.
        observer: gets the events about the engines.
        turned: the switches to turn in each model that trains. None for no switch.
    """
    from deepspeed.moe.layer import MoE

    followers, direct = Followers(), DirectSteps()

    def merge(passed: DeepSpeedConfig, is_trained: bool) -> DeepSpeedConfig:
        if not is_trained:
            return in_a_trial(passed)
        if not observer.has_engine:
            followers.start_over()
        facts.note_config(passed)
        return in_a_trial(overwrite_deepspeed_config(passed, followers.overrides_for(passed, overrides)))

    def built(engine: Any, is_trained: bool) -> None:
        if not is_trained:
            observer.frozen_engine_built()
            return
        if getattr(engine, "client_optimizer", None) is not None:
            facts.note_optimizer(engine.basic_optimizer)
        direct.watch(engine)
        is_native = any(isinstance(module, MoE) for module in engine.module.modules())
        # DeepSpeed 0.19 has AutoEP, and an engine that knows of either.
        facts.by_autoep |= not is_native and bool(getattr(engine, "has_moe_layers", False))
        facts.has_experts |= is_native or facts.by_autoep
        observer.engine_built(engine)

    turning = Turning(turned, facts)
    _stand_in_for_initialize(merge, observer.initialize_called, built, turning, facts)
    original_destroy = torch.distributed.destroy_process_group

    def destroy_process_group(group: Any = None) -> None:
        """Replaces `torch.distributed.destroy_process_group`."""
        if group is None:
            observer.group_destroyed()
        original_destroy(group)

    stand_in("destroy_process_group", original_destroy, destroy_process_group)
    _configure_activation_checkpointing(overrides, facts)
    engine_checkpoints.install(facts)


def _configure_activation_checkpointing(overrides: Mapping[str, Any], facts: ProgramFacts) -> None:
    """Makes the code's `deepspeed.checkpointing.configure` follow the candidate.

    It also records whether the configuration controls activation checkpointing.

    Arguments of the code have precedence over the configuration, in a trial as without one.
    """
    from deepspeed.runtime.activation_checkpointing import checkpointing

    original = checkpointing.configure
    signature = inspect.signature(original)
    section = {_CHECKPOINTING: overrides[_CHECKPOINTING]} if _CHECKPOINTING in overrides else {}

    def configure(*args: Any, **kwargs: Any) -> Any:
        """Replaces `deepspeed.checkpointing.configure`."""
        call = signature.bind(*args, **kwargs)
        passed = _read(call.arguments.get("deepspeed_config"))
        if passed is not None:
            says_itself = any(call.arguments.get(name) is not None for name in _CHECKPOINTING_BY_CODE)
            facts.reads_activation_checkpointing |= not says_itself
            call.arguments["deepspeed_config"] = overwrite_deepspeed_config(passed, section)
        return original(*call.args, **call.kwargs)

    checkpointing.configure = configure


def adopt(ds_config: Mapping[str, Any], turned: Mapping[str, Any] | None = None) -> None:
    """Makes the code train with a configuration in place of its own.

    The differences from the configuration of the first engine that trains are merged into the configuration of each
    engine that trains. Another engine keeps its own values for the rest. An "auto" is for the code to decide.

    Args:
        ds_config: a complete DeepSpeed configuration, such as a study's winner.
        turned: the switches to turn in each model that trains. None for no switch.
    """
    found: list[DeepSpeedConfig] = []
    followers = Followers()
    _configure_activation_checkpointing(ds_config, ProgramFacts())

    def merge(passed: DeepSpeedConfig, is_trained: bool) -> DeepSpeedConfig:
        if not is_trained:
            return passed
        if not found:
            found.append(difference(passed, ds_config))
        return overwrite_deepspeed_config(passed, followers.overrides_for(passed, found[0]))

    _stand_in_for_initialize(merge, expected.require, lambda engine, is_trained: None, Turning(turned))


def let_config_count(turned: Mapping[str, Any] | None = None) -> None:
    """Makes the code's `config` win if the code also passes a configuration to `deepspeed.initialize` in `args`.

    Args:
        turned: the switches to turn in each model that trains. None for no switch.
    """
    before = expected.require
    _stand_in_for_initialize(
        lambda passed, is_trained: passed, before, lambda engine, is_trained: None, Turning(turned)
    )


def _stand_in_for_initialize(
    merge: Callable[[DeepSpeedConfig, bool], DeepSpeedConfig],
    before: Callable[[], None],
    after: Callable[[Any, bool], None],
    turning: Turning,
    facts: ProgramFacts | None = None,
) -> None:
    """Replaces `deepspeed.initialize`.

    Args:
        merge: returns the configuration to use in place of the code's, given whether the engine trains.
        before: called when a call begins.
        after: called with the new engine, and whether it trains.
        turning: turns switches of the models that train.
        facts: collect a call that passes two configurations.
    """
    import deepspeed

    original = deepspeed.initialize
    signature = inspect.signature(original)

    def initialize(*args: Any, **kwargs: Any) -> Any:
        """Replaces `deepspeed.initialize`."""
        before()
        try:
            call = signature.bind(*args, **kwargs)
        except TypeError:
            # DeepSpeed refuses this as well, with its own message.
            return original(*args, **kwargs)
        with _Configuration(call.arguments) as configuration:
            passed = configuration.read()
            is_trained = passed is None or trains(call.arguments.get("optimizer"), passed)
            if passed is not None:
                configuration.replace(merge(passed, is_trained))
            if facts is not None:
                caller = str(sys._getframe(1).f_globals.get("__name__"))
                facts.by_lightning |= bool(_LIGHTNING.match(caller))
                facts.hands_over_two_configs |= configuration.is_handed_over_twice
            if is_trained:
                turning.before(call.arguments)
            with keys_named(call.arguments.get("config")):
                built = original(*call.args, **call.kwargs)
            configuration.complete(built[0])
        after(built[0], is_trained)
        if is_trained:
            turning.after(built[0])
        return built

    initialize.__wrapped__ = original  # type: ignore[attr-defined]
    stand_in("initialize", original, initialize)


def in_a_trial(config: DeepSpeedConfig) -> DeepSpeedConfig:
    """Returns a configuration without sections that write to the user's runs and folders. Only a trial uses it."""
    quiet = {name: {**config[name], "enabled": False} for name in _ELSEWHERE if isinstance(config.get(name), dict)}
    return {**config, **quiet}


class _Configuration:
    """The DeepSpeed configuration of one call of `initialize`, wherever the code has put it.

    As a context manager, it restores the code's `args`.

    Args:
        arguments: of the call by name. They are changed in place.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments
        self._args = arguments.get("args")
        self._hidden: dict[str, Any] = {}
        self._has_lost_its_batch: DeepSpeedConfig | None = None
        in_call = [(name, arguments.get(name)) for name in ("config", "config_params")]
        in_args = [(name, getattr(self._args, name, None)) for name in ("deepscale_config", "deepspeed_config")]
        # DeepSpeed takes the first of the two arguments.
        self._in_call = [(name, value) for name, value in in_call if value is not None][:1]
        self._in_args = [(name, value) for name, value in in_args if value is not None]

    def __enter__(self) -> "_Configuration":
        return self

    def __exit__(self, *error: object) -> None:
        for name, value in self._hidden.items():
            setattr(self._args, name, value)

    @property
    def is_handed_over_twice(self) -> bool:
        """Whether one is in the call and one in `args`. The call's counts, as in DeepSpeed before it refused."""
        return bool(self._in_call and self._in_args)

    def read(self) -> DeepSpeedConfig | None:
        """Returns the configuration; None if there is none, or none that DeepSpeed accepts.

        DeepSpeed raises its own error then.
        """
        passed = self._in_call or self._in_args
        return _read(passed[0][1]) if len(passed) == 1 else None

    def replace(self, config: DeepSpeedConfig) -> None:
        """Replaces the configuration, and hides those in `args`, because DeepSpeed refuses two."""
        for name, value in self._in_args:
            self._hidden[name] = value
            setattr(self._args, name, None)
        own = self._in_call[0][1] if self._in_call else None
        if isinstance(own, dict):
            # For code that later reads its batch size from its own dictionary.
            had_train_batch = TRAIN_BATCH in own
            if config is not own:
                config = {**config}
                own.clear()
                own.update(config)
            config = own
            self._has_lost_its_batch = own if had_train_batch and TRAIN_BATCH not in own else None
        self._arguments.pop("config_params", None)
        self._arguments["config"] = config

    def complete(self, engine: Any) -> None:
        """Restores the code's own dictionary, with the values that DeepSpeed has derived."""
        if self._has_lost_its_batch is not None:
            self._has_lost_its_batch[TRAIN_BATCH] = engine.train_batch_size()


def _read(value: Any) -> DeepSpeedConfig | None:
    """Returns the configuration in a dictionary, a path or base64; None if DeepSpeed would refuse it."""
    if isinstance(value, dict):
        return value
    if not isinstance(value, (str, Path)):
        return None
    try:
        return read_named_config(str(value), Path(), where="")
    except InputError:
        return None
