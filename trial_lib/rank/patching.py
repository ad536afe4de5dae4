"""Tables of what is replaced in a user's program, and the one way to replace it and to put it back.

A function is replaced under all its names, and when the program imports its module.
"""

import contextlib
import functools
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

# The names under which every rank replaces functions before the program runs.
OF_RANKS = (
    *("open", "_builtin_open", "bltn_open", "rmtree", "save", "load", "safe_open"),
    *("initialize", "destroy_process_group", "init_process_group", "start_processes"),
)
_noted: dict[str, list[ModuleType]] = {}
_newest = ""


def note_names() -> None:
    """Notes which modules have a name of `OF_RANKS`, for the forks of this process.

    A fork that looks through all modules copies the memory page of each. With some 3,000 modules that takes 20 ms.
    """
    global _newest
    modules = list(sys.modules.values())
    for name in OF_RANKS:
        _noted[name] = [module for module in modules if name in getattr(module, "__dict__", {})]
    _newest = next(reversed(sys.modules))


class Patch(NamedTuple):
    """One row of a table of what is replaced in a user's program."""

    library: str  # a module. Until the program imports it, nothing is replaced.
    what: str  # a function of it, or what an owner in it has (`Tensor.numpy`). Spaces separate several.
    why: str
    # Makes the replacement, of the original and of what `install` was given.
    make: Callable[[Any, Any], Any]
    may_lack: bool = False  # whether some versions of the library have none, and go without
    aliases: str = ""  # further names that modules have for the function

    def apply(self, module: ModuleType, given: Any) -> None:
        for what in self.what.split():
            path, _, name = what.rpartition(".")
            owner: Any = module
            for part in path.split(".") if path else ():
                owner = getattr(owner, part, None) if self.may_lack else getattr(owner, part)
            if self.may_lack and not hasattr(owner, name):
                continue
            original = getattr(owner, name)
            replacement = self.make(original, given)
            _let_scripts_call(replacement, original)
            if path:
                put(owner, name, replacement)
            else:
                for each in (name, *self.aliases.split()):
                    stand_in(each, original, replacement)


class Change(NamedTuple):
    """One row of such a table: a change of a library that replaces nothing by a name, and is not put back."""

    library: str  # a module, as that of `Patch`
    what: str
    why: str
    change: Callable[[ModuleType, Any], Any]  # gets the module, and what `install` was given

    def apply(self, module: ModuleType, given: Any) -> None:
        self.change(module, given)


Table: TypeAlias = Sequence[Patch | Change]


def install(table: Iterable[Patch | Change], given: Any = None) -> None:
    """Replaces what a table lists, in its order: at once in modules that are imported, in others when they are."""
    for row in table:
        when_imported(row.library, functools.partial(row.apply, given=given))


@contextlib.contextmanager
def installed(table: Iterable[Patch | Change], given: Any = None) -> Iterator[None]:
    """As `install`, and puts back at its end what has been replaced since. A `Change` stays."""
    since, waiting = len(_before), {name: list(calls) for name, calls in _finder.waiting.items()}
    install(table, given)
    try:
        yield
    finally:
        while len(_before) > since:
            owner, name, value = _before.pop()
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        _finder.waiting = waiting


_ABSENT = object()
# Owners, names and what stood there, in the order in which that was replaced.
_before: list[tuple[Any, str, Any]] = []


def put(owner: Any, name: str, replacement: Any) -> None:
    """Puts a replacement in its place, of a module, a class or an object. `REPLACED` lists them."""
    # A class may inherit it, and has a method of its own class as it is only there.
    before = vars(owner).get(name, _ABSENT) if isinstance(owner, type) else getattr(owner, name, _ABSENT)
    _before.append((owner, name, before))
    setattr(owner, name, replacement)


def always(value: Any) -> Callable[[Any, Any], Any]:
    """For `Patch.make`: a function that returns the same whatever it gets."""
    return lambda original, given: lambda *args, **kwargs: value


def instead(replacement: Any) -> Callable[[Any, Any], Any]:
    """For `Patch.make`: the same replacement whatever the original is."""
    return lambda original, given: replacement


def around(call: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """For `Patch.make`: a function that calls `call`, with the original before its arguments."""

    def make(original: Any, given: Any) -> Any:
        return functools.wraps(original)(lambda *args, **kwargs: call(original, *args, **kwargs))

    return make


def with_given(call: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """As `around`. What `install` was given comes before the original."""
    return lambda original, given: around(functools.partial(call, given))(original, given)


def stand_in(name: str, original: Any, replacement: Callable[..., Any]) -> None:
    """Replaces a function, also in primed modules that have bound it to a name of their own."""
    for module in _modules_with(name):
        if getattr(module, "__dict__", {}).get(name) is original:
            put(module, name, replacement)


def replace(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Replaces a function of a class or a module by `call`, which gets the original before its arguments."""
    put(owner, name, around(call)(getattr(owner, name), None))


def _let_scripts_call(replacement: Any, original: Any) -> None:
    # Code that TorchScript compiles may call one of torch's functions. Ranks import this module before torch.
    builtin: Any = sys.modules.get("torch.jit._builtins")
    operator = None if builtin is None else builtin._find_builtin(original)
    if operator is not None:
        builtin._register_builtin(replacement, operator)


def _modules_with(name: str) -> list[ModuleType]:
    if name not in _noted:
        return list(sys.modules.values())
    # Python keeps the modules in the order of their imports.
    newer = itertools.takewhile(lambda imported: imported[0] != _newest, reversed(sys.modules.items()))
    return [*_noted[name], *(module for _, module in newer)]


# Callbacks of imports, so that a module that the program does not use costs nothing

_Call = Callable[[ModuleType], None]


def when_imported(name: str, call: _Call) -> None:
    """Calls back with a module: at once if it is imported (in the fork server), else after its import.

    If an import fails, the call comes after a later import that succeeds. The import raises the callback's exceptions.
    """
    module = sys.modules.get(name)
    if module is not None:
        call(module)
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.waiting.setdefault(name, []).append(call)


class _Finder(MetaPathFinder):
    # Lets the other finders find a module, and adds the callback to its loading.

    def __init__(self) -> None:
        self.waiting: dict[str, list[_Call]] = {}
        self._searching: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.waiting or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.discard(fullname)
        if spec is not None and spec.loader is not None:
            self._call_after(spec)
        return spec

    def _call_after(self, spec: ModuleSpec) -> None:
        # Calls back after the module's code. The loader keeps its type, because other code may look at it later.
        loader = spec.loader
        assert loader is not None
        exec_module = loader.exec_module

        def exec_and_call(module: ModuleType) -> None:
            del loader.exec_module
            exec_module(module)
            for call in self.waiting.pop(spec.name, []):
                call(module)

        loader.exec_module = exec_and_call  # type: ignore[method-assign]


_finder = _Finder()


# What a trial replaces in the process of a user's program: one table, by library and reason. `zerotune doctor` prints
# it, and a test installs everything and compares. Nothing is replaced in a library that the program does not import.


class Replaced(NamedTuple):
    library: str  # as people call it
    why: str  # a sentence
    names: tuple[str, ...]  # of the functions, with their module and class


def _replaced(library: str, why: str, *places: str) -> Replaced:
    # A place is `module: names`.
    split = (place.partition(": ") for place in places)
    return Replaced(library, why, tuple(f"{module}.{name}" for module, _, names in split for name in names.split()))


REPLACED = (
    _replaced(
        "Python",
        "Changes of your files go to the trial's copies.",
        "builtins: open",
        "io: open",
        "os: access chmod chown fchmod fchown lchown link listdir lstat mkdir open readlink remove "
        "removexattr rename replace rmdir scandir setxattr stat symlink truncate unlink utime",
        "shutil: rmtree",
    ),
    _replaced(
        "Python",
        "A program that ends its process is measured before.",
        "os: _exit execv execve kill killpg",
        "signal: raise_signal",
    ),
    _replaced("Python", "Launchers that the program starts are refused.", "os: system", "subprocess: Popen.__init__"),
    _replaced("Python", "The rank keeps its port and its devices.", "os: environ.__class__"),
    _replaced("Python", "The options that the program reads are noted.", "argparse: ArgumentParser.parse_known_args"),
    _replaced(
        "Python",
        "Shared memory that the program leaves behind is removed.",
        "multiprocessing.shared_memory: _posixshmem",
    ),
    _replaced(
        "torch",
        "Checkpoints of a trial go to the trial's folder.",
        "torch.serialization: load save",
        "torch.distributed.checkpoint.filesystem: FileSystemReader.__init__ FileSystemReader.reset "
        "_FileSystemWriter.__init__ _FileSystemWriter.reset",
    ),
    _replaced(
        "torch",
        "Ranks meet at the trial's port; other ranks are refused.",
        "torch.distributed.distributed_c10d: destroy_process_group init_process_group",
        "torch.multiprocessing.spawn: start_processes",
    ),
    _replaced(
        "torch",
        "Loaders and Adam follow the candidate; waits are timed; a round's data begin elsewhere.",
        "torch.utils.data.dataloader: DataLoader.__init__ DataLoader.__iter__ _BaseDataLoaderIter.__init__ "
        "_BaseDataLoaderIter.__next__",
        "torch.utils.data._utils.fetch: _IterableDatasetFetcher.__init__",
        "torch.optim.adam: Adam.__init__",
        "torch.optim.adamw: AdamW.__init__",
    ),
    _replaced(
        "torch",
        "Builds of extensions are timed.",
        "torch.utils.cpp_extension: _import_module_from_library _jit_compile _run_ninja_build",
    ),
    _replaced(
        "torch",
        "Activations that the program recomputes are noted.",
        "torch.utils.checkpoint: CheckpointFunction.forward _checkpoint_without_reentrant_generator",
        "deepspeed.runtime.activation_checkpointing.checkpointing: CheckpointFunction.forward non_reentrant_checkpoint",
    ),
    _replaced(
        "TensorBoard",
        "Its files go to the trial's folder.",
        "torch.utils.tensorboard.writer: SummaryWriter.__init__",
        "tensorboardX.writer: SummaryWriter.__init__",
    ),
    _replaced(
        "Lightning",
        "Its command line does not save its configuration.",
        "lightning.pytorch.cli: SaveConfigCallback.setup",
        "pytorch_lightning.cli: SaveConfigCallback.setup",
    ),
    _replaced(
        "DeepSpeed",
        "The candidate is merged in, and the engine is measured.",
        "deepspeed: initialize",
        "deepspeed.runtime.activation_checkpointing.checkpointing: configure",
        "deepspeed.runtime.zero.partition_parameters: Init.__init__",
    ),
    # Of each engine's own object, until its measurement ends.
    _replaced(
        "DeepSpeed",
        "The steps of an engine that trains are timed.",
        "deepspeed.runtime.engine: DeepSpeedEngine._take_model_step DeepSpeedEngine.backward "
        "DeepSpeedEngine.forward DeepSpeedEngine.scale DeepSpeedEngine.step",
        "deepspeed.runtime.pipe.engine: PipelineEngine._INSTRUCTION_MAP PipelineEngine._next_batch "
        "PipelineEngine.train_batch",
        "torch: Tensor.backward",
    ),
    _replaced(
        "DeepSpeed",
        "A trial saves no checkpoint, and loads no weights.",
        "deepspeed.runtime.engine: DeepSpeedEngine.load_checkpoint DeepSpeedEngine.save_16bit_model "
        "DeepSpeedEngine.save_checkpoint DeepSpeedEngine.save_fp16_model",
    ),
    _replaced(
        "DeepSpeed",
        "It swaps to the trial's own folder.",
        "deepspeed.runtime.zero.offload_config: DeepSpeedZeroOffloadOptimizerConfig.__init__ "
        "DeepSpeedZeroOffloadParamConfig.__init__",
    ),
    _replaced(
        "DeepSpeed",
        "Builds of ops are noted.",
        "deepspeed.ops.op_builder.builder: OpBuilder.jit_load",
    ),
    _replaced(
        "Accelerate",
        "Its configuration follows the candidate; it only trains.",
        "accelerate.accelerator: Accelerator.init_trackers Accelerator.load_state Accelerator.prepare "
        "Accelerator.save_model Accelerator.save_state",
        "accelerate.utils.dataclasses: DeepSpeedPlugin.__post_init__ DeepSpeedPlugin.set_mixed_precision",
        "accelerate.utils.deepspeed: HfDeepSpeedConfig.__init__",
    ),
    _replaced(
        "transformers",
        "The Trainer follows the candidate, and only trains.",
        "transformers.hf_argparser: HfArgumentParser.parse_args_into_dataclasses",
        "transformers.integrations.deepspeed: HfTrainerDeepSpeedConfig.fill_match "
        "HfTrainerDeepSpeedConfig.trainer_config_process deepspeed_init",
        "transformers.trainer: Trainer.create_model_card Trainer.create_scheduler Trainer.push_to_hub "
        "Trainer.save_metrics Trainer.save_model Trainer.save_state Trainer.set_initial_training_values "
        "Trainer.train",
        "transformers.trainer_callback: TrainerControl.should_evaluate TrainerControl.should_save",
        "transformers.training_args: TrainingArguments.__post_init__",
    ),
    _replaced(
        "transformers",
        "Models are saved to the trial only; nothing is uploaded.",
        "transformers.modeling_utils: PreTrainedModel.save_pretrained",
        "transformers.tokenization_utils_base: PreTrainedTokenizerBase.save_pretrained",
        "transformers.utils.hub: PushToHubMixin.__init_subclass__ PushToHubMixin._create_repo "
        "PushToHubMixin._upload_modified_files PushToHubMixin.push_to_hub PushToHubMixin.save_pretrained",
    ),
    _replaced("PEFT", "Adapters are saved to the trial only.", "peft.peft_model: PeftModel.save_pretrained"),
    _replaced(
        "safetensors",
        "Its files go to the trial's folder.",
        "safetensors: safe_open",
        "safetensors.torch: serialize_file",
    ),
    _replaced(
        "MLflow",
        "Runs of the program go to a store of the trial's own.",
        "mlflow.tracking._model_registry.utils: _resolve_registry_uri get_registry_uri set_registry_uri",
        "mlflow.tracking._tracking_service.utils: _resolve_tracking_uri get_tracking_uri set_tracking_uri",
        "mlflow.tracking.fluent: set_experiment start_run",
    ),
    _replaced("Weights & Biases", "It is off in a trial.", "wandb: init login"),
    _replaced(
        "torch and its frameworks",
        "With --beside, in trials without DeepSpeed: its framework is told so, and the wrapped model is measured.",
        "torch.nn.parallel.distributed: DistributedDataParallel.__init__",
        "torch.optim.optimizer: Optimizer.__init__",
        "torch.amp.grad_scaler: GradScaler.scale",
        "accelerate.accelerator: Accelerator.__init__",
        "lightning.pytorch.trainer.trainer: Trainer.__init__",
        "pytorch_lightning.trainer.trainer: Trainer.__init__",
    ),
)
