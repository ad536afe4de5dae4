"""Replaces DeepSpeed's own functions before the user's code runs, however the code calls them."""

import functools
import inspect
import re
import sys
import types
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch

from zerotune.trial_lib.deepspeed_config.overrides import (
    TRAIN_BATCH,
    DeepSpeedConfig,
    difference,
    overwrite_deepspeed_config,
    read_named_config,
)
from zerotune.trial_lib.messages.build_times import has_work
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.rank import device
from zerotune.trial_lib.rank.batch_source import composed_by_hydra
from zerotune.trial_lib.rank.endings import keys_named
from zerotune.trial_lib.rank.engine_watch import Followers, trains
from zerotune.trial_lib.rank.model_transforms import ModelTransforms
from zerotune.trial_lib.rank.patching import put, replace, stand_in, when_imported
from zerotune.trial_lib.rank.program_facts import ProgramFacts
from zerotune.trial_lib.search.knobs import STAGE, get_knob

# A program that steps an optimizer itself, and not DeepSpeed's engine

# By so many steps of an optimizer some engine must have made one.
_ENOUGH = 3
_WATCHED = "zerotune_watched"


class DirectSteps:
    """Ends a program that only steps its optimizers itself: an engine counts steps, and knows accumulation by them."""

    def __init__(self) -> None:
        self._of_engines = self._others = self._depth = 0

    def watch(self, engine: Any) -> None:
        if not hasattr(engine, "_take_model_step"):
            return
        self._follow(engine)
        for name in ("optimizer", "basic_optimizer"):
            optimizer: Any = getattr(engine, name, None)
            # Several engines may have one optimizer.
            if hasattr(optimizer, "step") and not getattr(optimizer.step, _WATCHED, False):
                self._follow_optimizer(optimizer)

    def _follow(self, engine: Any) -> None:
        original = engine._take_model_step

        @functools.wraps(original)
        def take_model_step(*args: Any, **kwargs: Any) -> Any:
            self._of_engines += 1
            self._depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._depth -= 1

        engine._take_model_step = take_model_step

    def _follow_optimizer(self, optimizer: Any) -> None:
        original = optimizer.step

        # With the marks of a schedule of the learning rate that follows the optimizer already.
        @functools.wraps(original)
        def step(itself: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._depth and not self._of_engines:
                self._others += 1
                if self._others >= _ENOUGH:
                    raise InputError(
                        "The program steps its optimizer, and not DeepSpeed's engine. DeepSpeed then counts no step, "
                        "and ends no accumulation.",
                        where="optimizer.step",
                        remedy="Call `engine.step()` in its place, after each `engine.backward(loss)`.",
                    )
            return original(*args, **kwargs)

        setattr(step, _WATCHED, True)
        # A method, because a schedule that comes later takes it for one.
        optimizer.step = types.MethodType(step, optimizer)


# The checkpoints of a trial's engines.

_SAVES = ("save_checkpoint", "save_16bit_model", "save_fp16_model")
# The files of layers and of experts have weights alone (deepspeed/runtime/engine.py, `_get_ckpt_name`).
_HAS_STATE = re.compile(r"(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt")
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
# What `DeepSpeedEngine._load_checkpoint` leaves out of the program's state unless it loads the module alone.
_OF_DEEPSPEED = (
    *("module", "skipped_steps", "global_steps", "dp_world_size", "mp_world_size"),
    *("data_sampler", "random_ltd"),
)


def install_engine_checkpoints(facts: ProgramFacts) -> None:
    """Replaces the methods of DeepSpeed's engines that save and load checkpoints."""
    import deepspeed

    engine = deepspeed.DeepSpeedEngine
    for name in _SAVES:
        if hasattr(engine, name):
            put(engine, name, lambda engine, *args, **kwargs: True)

    def load_checkpoint(
        original: Callable[..., Any],
        engine: Any,
        load_dir: Any,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> Any:
        is_universal = bool(engine.load_universal_checkpoint())
        file = _file_with_state(Path(load_dir), tag, is_universal)
        if file is None:
            # DeepSpeed says what is missing.
            flags = load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only
            return original(engine, load_dir, tag, *flags, custom_load_fn)
        # As DeepSpeed reads it. The file's tensors are not read if it can be mapped.
        saved = torch.load(file, map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=False)
        if not load_module_only:
            for name in _COUNTERS:
                if name in saved:
                    setattr(engine, name, saved[name])
        resumes = load_optimizer_states and not load_module_only and engine.optimizer is not None
        if resumes and not is_universal:
            facts.note_resumed(saved.get("ds_config"))
        left_out = {"module"} if load_module_only else {*_OF_DEEPSPEED}
        left_out |= {"lr_scheduler"} if load_lr_scheduler_states else set()
        left_out |= {"optimizer"} if load_optimizer_states else set()
        return str(file), {name: value for name, value in saved.items() if name not in left_out}

    replace(engine, "load_checkpoint", load_checkpoint)


def _file_with_state(folder: Path, tag: Any, is_universal: bool) -> Path | None:
    # The file of a checkpoint that has the program's own state; None if there is none.
    if tag is None:
        latest = folder / ("latest_universal" if is_universal else "latest")
        if not latest.is_file():
            return None
        tag = latest.read_text().strip()
    files = folder.joinpath(str(tag)).glob("*.pt")
    return min((file for file in files if _HAS_STATE.fullmatch(file.name)), default=None)


# Sections that make DeepSpeed write to a place, or an account, of the user's; and DeepSpeed's own tuner.
_ELSEWHERE = ("tensorboard", "wandb", "csv_monitor", "comet", "autotuning")
_CHECKPOINTING = "activation_checkpointing"
_CHECKPOINTING_BY_CODE = ("partition_activations", "contiguous_checkpointing", "num_checkpoints", "checkpoint_in_cpu")


_LIGHTNING = re.compile(r"(lightning\.pytorch|pytorch_lightning)\.")


class InitializeObserver(Protocol):
    """The receiver of events about the engines that the user's code builds."""

    @property
    def has_engine(self) -> bool: ...  # in this run of the code, one that trains
    def initialize_called(self) -> None: ...
    def engine_built(self, engine: Any) -> None: ...  # one that trains
    def frozen_engine_built(self) -> None: ...
    def group_destroyed(self) -> None: ...  # before it is destroyed; the ranks cannot agree afterwards


def intercept(
    overrides: Mapping[str, Any],
    facts: ProgramFacts,
    observer: InitializeObserver,
    turned: Mapping[str, Any] | None = None,
) -> None:
    """Makes `deepspeed.initialize` merge a candidate's overrides in for engines that train; checkpoints stay."""
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
        by_autoep = facts.found.by_autoep or (not is_native and bool(getattr(engine, "has_moe_layers", False)))
        facts.note(by_autoep=by_autoep, has_experts=facts.found.has_experts or is_native or by_autoep)
        observer.engine_built(engine)

    transforms = ModelTransforms(turned, facts)
    # Looked up at each call: in a sweep, another probe observes later.
    _stand_in_for_initialize(merge, lambda: observer.initialize_called(), built, transforms, facts)
    original_destroy = torch.distributed.destroy_process_group

    def destroy_process_group(group: Any = None) -> None:
        if group is None:
            observer.group_destroyed()
        original_destroy(group)

    stand_in("destroy_process_group", original_destroy, destroy_process_group)
    _configure_activation_checkpointing(overrides, facts)
    install_engine_checkpoints(facts)


def _configure_activation_checkpointing(overrides: Mapping[str, Any], facts: ProgramFacts) -> None:
    # Arguments of the code have precedence over the configuration, in a trial as without one.
    from deepspeed.runtime.activation_checkpointing import checkpointing

    original = checkpointing.configure
    signature = inspect.signature(original)
    section = {_CHECKPOINTING: overrides[_CHECKPOINTING]} if _CHECKPOINTING in overrides else {}

    def configure(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        passed = _read(call.arguments.get("deepspeed_config"))
        if passed is not None:
            says_itself = any(call.arguments.get(name) is not None for name in _CHECKPOINTING_BY_CODE)
            if not says_itself:
                facts.note(reads_activation_checkpointing=True)
            call.arguments["deepspeed_config"] = overwrite_deepspeed_config(passed, section)
        return original(*call.args, **call.kwargs)

    put(checkpointing, "configure", configure)


def adopt(ds_config: Mapping[str, Any], turned: Mapping[str, Any] | None = None) -> None:
    """Makes the code train with a complete configuration, such as a study's winner, in place of its own.

    The differences from the configuration of the first engine that trains are merged into that of each engine that
    trains. Another engine keeps its own values for the rest. An "auto" is for the code to decide.
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

    _stand_in_for_initialize(merge, device.require, lambda engine, is_trained: None, ModelTransforms(turned))


def let_config_count(turned: Mapping[str, Any] | None = None) -> None:
    """Makes the code's `config` win if it also passes a configuration to `deepspeed.initialize` in `args`."""
    _stand_in_for_initialize(
        lambda passed, is_trained: passed, device.require, lambda *_: None, ModelTransforms(turned)
    )


def _stand_in_for_initialize(
    merge: Callable[[DeepSpeedConfig, bool], DeepSpeedConfig],  # given the code's, and whether the engine trains
    before: Callable[[], None],
    after: Callable[[Any, bool], None],  # given the new engine, and whether it trains
    transforms: ModelTransforms,
    facts: ProgramFacts | None = None,
) -> None:
    import deepspeed

    original = deepspeed.initialize
    signature = inspect.signature(original)

    def initialize(*args: Any, **kwargs: Any) -> Any:
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
                facts.note(
                    by_lightning=facts.found.by_lightning or bool(_LIGHTNING.match(caller)),
                    hydra_config=composed_by_hydra(),
                    hands_over_two_configs=facts.found.hands_over_two_configs or configuration.is_handed_over_twice,
                )
            if is_trained:
                transforms.before(call.arguments)
            with keys_named(call.arguments.get("config")):
                built = original(*call.args, **call.kwargs)
            configuration.complete(built[0])
        after(built[0], is_trained)
        if is_trained:
            transforms.after(built[0])
        return built

    initialize.__wrapped__ = original  # type: ignore[attr-defined]
    stand_in("initialize", original, initialize)


def in_a_trial(config: DeepSpeedConfig) -> DeepSpeedConfig:
    """A configuration without sections that write to the user's runs and folders. Only a trial uses it."""
    quiet = {name: {**config[name], "enabled": False} for name in _ELSEWHERE if isinstance(config.get(name), dict)}
    return {**config, **quiet}


class _Configuration:
    # The DeepSpeed configuration of one call of `initialize`, wherever the code has put it. The arguments of the call
    # are changed in place. As a context manager, it restores the code's `args`.

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
        # The call's counts, as in DeepSpeed before it refused two.
        return bool(self._in_call and self._in_args)

    def read(self) -> DeepSpeedConfig | None:
        # None if there is none, or none that DeepSpeed accepts, which then raises its own error.
        passed = self._in_call or self._in_args
        return _read(passed[0][1]) if len(passed) == 1 else None

    def replace(self, config: DeepSpeedConfig) -> None:
        # Hides those in `args`, because DeepSpeed refuses two.
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
        # Restores the code's own dictionary, with the values that DeepSpeed has derived.
        if self._has_lost_its_batch is not None:
            self._has_lost_its_batch[TRAIN_BATCH] = engine.train_batch_size()


def _read(value: Any) -> DeepSpeedConfig | None:
    # The configuration in a dictionary, a path or base64; None if DeepSpeed would refuse it.
    if isinstance(value, dict):
        return value
    if not isinstance(value, (str, Path)):
        return None
    try:
        return read_named_config(str(value), Path(), where="")
    except InputError:
        return None


# `deepspeed.zero.Init` does nothing below stage 3, where engines take no partitioned parameters
# Those two check the stage before they use it. DeepSpeed's engine partitions at stage 3 if the code has not. In a sweep
# this replacement finds itself in place.
_BY_STAGE = ("transformers", "accelerate", "deepspeed", "zerotune")


def install_zero_init(overrides: Mapping[str, Any], facts: ProgramFacts) -> None:
    """Makes `deepspeed.zero.Init` follow a candidate, before the program runs.

    It counts for every engine that trains. Another engine of stage 3 partitions its model itself. Overrides without a
    stage leave the context as it is.
    """
    stage = get_knob(overrides, STAGE)
    _follow_zero_init(lambda _: stage, facts)


def adopt_zero_init(ds_config: Mapping[str, Any], is_in_code: bool) -> None:
    """Makes `deepspeed.zero.Init` follow a full experiment's configuration.

    If the program's own is in its code, a call with a configuration follows `ds_config`. Otherwise the configuration of
    a call is that of its engine, which may be another one that only computes.
    """
    stage = get_knob(ds_config, STAGE)
    _follow_zero_init(lambda named: stage if is_in_code or named is None else _stage_of(named), ProgramFacts())


def _stage_of(named: Any) -> Any:
    config = _read(named)
    return None if config is None else get_knob(config, STAGE, 0)


def _follow_zero_init(stage_for: Callable[[Any], Any], facts: ProgramFacts) -> None:
    module = "deepspeed.runtime.zero.partition_parameters"
    when_imported(module, functools.partial(_follow_stage, stage_for, facts))


def _follow_stage(stage_for: Callable[[Any], Any], facts: ProgramFacts, module: ModuleType) -> None:
    context: Any = module.Init
    original = context.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        call = signature.bind(*args, **kwargs)
        caller = str(sys._getframe(1).f_globals.get("__name__", ""))
        if call.arguments.get("enabled", True) and caller.partition(".")[0] not in _BY_STAGE:
            facts.note(partitions_its_model=True)
            named = call.arguments.get("config_dict_or_path") or call.arguments.get("config")
            if stage_for(named) in (0, 1, 2):
                # A module that is passed to it would be partitioned all the same.
                call.arguments.update(enabled=False, module=None)
        original(*call.args, **call.kwargs)

    put(context, "__init__", init)


# The first run of a program ends where it needs an op of DeepSpeed's that is not built

_OF_THE_GROUP = "ShareMemCommBuilder"


class OpNotBuiltError(BaseException):
    """An op is not built. The message is the name of its builder. No program handles this as an error of its own."""


class _Loads:
    # The builder of the op that is being loaded. None for any other extension, which may be built.
    now: str | None = None
    has_left_out = False  # the process group was made without its op
    needs_all = False  # an engine is being made, which needs every op


def end_at_unbuilt_ops() -> None:
    """Ends this rank, from now on, where DeepSpeed would compile an op."""

    def follow_builds(module: ModuleType) -> None:
        run = module._run_ninja_build

        def run_if_built(build_directory: str, *arguments: Any, **options: Any) -> None:
            # torch also calls it for built ops.
            if _Loads.now is not None and has_work(Path(build_directory)):
                raise OpNotBuiltError(_Loads.now)
            run(build_directory, *arguments, **options)

        put(module, "_run_ninja_build", run_if_built)
        load = module._import_module_from_library

        def load_if_built(name: str, path: str, *arguments: Any, **options: Any) -> Any:
            # torch has waited here for another rank, which would have built it and has not.
            if _Loads.now is not None and not Path(path, f"{name}.so").exists():
                raise OpNotBuiltError(_Loads.now)
            return load(name, path, *arguments, **options)

        put(module, "_import_module_from_library", load_if_built)

    def follow_loads(module: ModuleType) -> None:
        load = module.OpBuilder.jit_load

        def jit_load(builder: Any, *arguments: Any, **options: Any) -> Any:
            _Loads.now = type(builder).__name__
            try:
                return load(builder, *arguments, **options)
            except OpNotBuiltError:
                if _Loads.needs_all or _Loads.now != _OF_THE_GROUP:
                    raise
                # DeepSpeed then sums by gloo.
                _Loads.has_left_out = True
                return None
            finally:
                _Loads.now = None

        put(module.OpBuilder, "jit_load", jit_load)

    when_imported("torch.utils.cpp_extension", follow_builds)
    when_imported("deepspeed.ops.op_builder.builder", follow_loads)


def engine_begins() -> None:
    """Ends this rank if an op was left out that its engine needs."""
    _Loads.needs_all = True
    if _Loads.has_left_out:
        raise OpNotBuiltError(_OF_THE_GROUP)
