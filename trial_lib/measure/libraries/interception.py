"""Standing in for DeepSpeed's own functions before the user's code runs, however it calls them."""

import inspect
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
from trial_lib.measure.program_facts import ProgramFacts
from trial_lib.wire.errors import InputError

# Sections with which DeepSpeed writes to a place, or an account, of the user's; and its own tuner.
_ELSEWHERE = ("tensorboard", "wandb", "csv_monitor", "comet", "autotuning")
_CHECKPOINTING = "activation_checkpointing"
_CHECKPOINTING_BY_CODE = ("partition_activations", "contiguous_checkpointing", "num_checkpoints", "checkpoint_in_cpu")
_SAVES = ("save_checkpoint", "save_16bit_model", "save_fp16_model")


class InitializeObserver(Protocol):
    """What is told of the engines that the user's code builds."""

    @property
    def has_engine(self) -> bool:
        """Whether this run of the code has built an engine that trains."""

    def initialize_called(self) -> None:
        """Called when `deepspeed.initialize` begins."""

    def engine_built(self, engine: Any) -> None:
        """Called with each engine that trains."""

    def frozen_engine_built(self) -> None:
        """Called when an engine is there that does not."""

    def group_destroyed(self) -> None:
        """Called before the code destroys the process group: afterwards the ranks cannot agree any more."""


def intercept(overrides: Mapping[str, Any], facts: ProgramFacts, observer: InitializeObserver) -> None:
    """Has `deepspeed.initialize` merge the overrides in for engines that train, and no engine save anything.

    Args:
        overrides: a candidate's part of the DeepSpeed configuration.
        facts: is told the configuration that the code itself passes for the first engine that trains.
        observer: is told of the engines.
    """
    import deepspeed
    from deepspeed.moe.layer import MoE

    followers = Followers()

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
        facts.has_experts |= any(isinstance(module, MoE) for module in engine.module.modules())
        observer.engine_built(engine)

    _stand_in_for_initialize(merge, observer.initialize_called, built, facts)
    original_destroy = torch.distributed.destroy_process_group

    def destroy_process_group(group: Any = None) -> None:
        """Stands in for `torch.distributed.destroy_process_group`."""
        if group is None:
            observer.group_destroyed()
        original_destroy(group)

    stand_in("destroy_process_group", original_destroy, destroy_process_group)
    _configure_activation_checkpointing(overrides, facts)
    for name in _SAVES:
        if hasattr(deepspeed.DeepSpeedEngine, name):
            setattr(deepspeed.DeepSpeedEngine, name, _saves_nothing)


def _configure_activation_checkpointing(overrides: Mapping[str, Any], facts: ProgramFacts) -> None:
    """Has the code's `deepspeed.checkpointing.configure` follow the candidate, and notes whether it goes by the file.

    What the code itself says there goes before the configuration, in a trial as without.
    """
    from deepspeed.runtime.activation_checkpointing import checkpointing

    original = checkpointing.configure
    signature = inspect.signature(original)
    section = {_CHECKPOINTING: overrides[_CHECKPOINTING]} if _CHECKPOINTING in overrides else {}

    def configure(*args: Any, **kwargs: Any) -> Any:
        """Stands in for `deepspeed.checkpointing.configure`."""
        call = signature.bind(*args, **kwargs)
        passed = _read(call.arguments.get("deepspeed_config"))
        if passed is not None:
            says_itself = any(call.arguments.get(name) is not None for name in _CHECKPOINTING_BY_CODE)
            facts.reads_activation_checkpointing |= not says_itself
            call.arguments["deepspeed_config"] = overwrite_deepspeed_config(passed, section)
        return original(*call.args, **call.kwargs)

    checkpointing.configure = configure


def adopt(ds_config: Mapping[str, Any]) -> None:
    """Has the code train with a configuration, in the place of the one that stands in it.

    What differs from the configuration of the first engine that trains is merged into that of each that does: another
    one keeps what is its own. An "auto" is for the code to decide.

    Args:
        ds_config: a complete DeepSpeed configuration, such as a study's winner.
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

    _stand_in_for_initialize(merge, expected.require, lambda engine, is_trained: None)


def let_config_count() -> None:
    """Has the code's `config` count where it hands `deepspeed.initialize` a configuration in its `args` as well."""
    before = expected.require
    _stand_in_for_initialize(lambda passed, is_trained: passed, before, lambda engine, is_trained: None)


def _stand_in_for_initialize(
    merge: Callable[[DeepSpeedConfig, bool], DeepSpeedConfig],
    before: Callable[[], None],
    after: Callable[[Any, bool], None],
    facts: ProgramFacts | None = None,
) -> None:
    """Puts a function in the place of `deepspeed.initialize`.

    Args:
        merge: returns the configuration to use for the one that the code passes, given whether the engine trains.
        before: called when a call begins.
        after: called with the engine that it has built, and whether that trains.
        facts: is told of a call that hands over two configurations.
    """
    import deepspeed

    original = deepspeed.initialize
    signature = inspect.signature(original)

    def initialize(*args: Any, **kwargs: Any) -> Any:
        """Stands in for `deepspeed.initialize`."""
        before()
        try:
            call = signature.bind(*args, **kwargs)
        except TypeError:
            # Refused by DeepSpeed as well, in its own words.
            return original(*args, **kwargs)
        with _Configuration(call.arguments) as configuration:
            passed = configuration.read()
            is_trained = passed is None or trains(call.arguments.get("optimizer"), passed)
            if passed is not None:
                configuration.replace(merge(passed, is_trained))
            if facts is not None:
                facts.hands_over_two_configs |= configuration.is_handed_over_twice
            with keys_named(call.arguments.get("config")):
                built = original(*call.args, **call.kwargs)
            configuration.complete(built[0])
        after(built[0], is_trained)
        return built

    initialize.__wrapped__ = original  # type: ignore[attr-defined]
    stand_in("initialize", original, initialize)


def _saves_nothing(engine: Any, *args: Any, **kwargs: Any) -> bool:
    """Stands in for an engine's `save_checkpoint` and its like: a trial leaves the user's checkpoints alone."""
    return True


def in_a_trial(config: DeepSpeedConfig) -> DeepSpeedConfig:
    """Returns a configuration without what writes to the user's runs and folders; for a trial's own eyes only."""
    quiet = {name: {**config[name], "enabled": False} for name in _ELSEWHERE if isinstance(config.get(name), dict)}
    return {**config, **quiet}


class _Configuration:
    """The DeepSpeed configuration of one call of `initialize`, wherever the code has put it.

    As a context manager, it leaves the code's `args` as they were.

    Args:
        arguments: of the call by name, to be changed in place.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments
        self._args = arguments.get("args")
        self._hidden: dict[str, Any] = {}
        self._has_lost_its_batch: DeepSpeedConfig | None = None
        in_call = [(name, arguments.get(name)) for name in ("config", "config_params")]
        in_args = [(name, getattr(self._args, name, None)) for name in ("deepscale_config", "deepspeed_config")]
        # Of the two arguments DeepSpeed takes the first.
        self._in_call = [(name, value) for name, value in in_call if value is not None][:1]
        self._in_args = [(name, value) for name, value in in_args if value is not None]

    def __enter__(self) -> "_Configuration":
        return self

    def __exit__(self, *error: object) -> None:
        for name, value in self._hidden.items():
            setattr(self._args, name, value)

    @property
    def is_handed_over_twice(self) -> bool:
        """Whether one stands in the call and one in `args`: the call's counts, as in DeepSpeed before it refused."""
        return bool(self._in_call and self._in_args)

    def read(self) -> DeepSpeedConfig | None:
        """Returns the configuration; None where there is none, or none that DeepSpeed would take: let it say so."""
        passed = self._in_call or self._in_args
        return _read(passed[0][1]) if len(passed) == 1 else None

    def replace(self, config: DeepSpeedConfig) -> None:
        """Puts another configuration in its place, and hides those in `args`: DeepSpeed refuses to be given two."""
        for name, value in self._in_args:
            self._hidden[name] = value
            setattr(self._args, name, None)
        own = self._in_call[0][1] if self._in_call else None
        if isinstance(own, dict):
            # For code that takes its batch size from its own dictionary afterwards.
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
        """Gives the code's own dictionary back what it had and DeepSpeed has derived."""
        if self._has_lost_its_batch is not None:
            self._has_lost_its_batch[TRAIN_BATCH] = engine.train_batch_size()


def _read(value: Any) -> DeepSpeedConfig | None:
    """Returns the configuration in a dictionary, a path, or base64; None for what DeepSpeed would refuse."""
    if isinstance(value, dict):
        return value
    if not isinstance(value, (str, Path)):
        return None
    try:
        return read_named_config(str(value), Path(), where="")
    except InputError:
        return None
