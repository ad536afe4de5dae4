"""The user's program: as a study knows it, and as its ranks run it."""

import hashlib
import logging
import os
import platform
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zerotune.trial_lib.deepspeed_config.layout import LAYOUTS, VARIABLES_OF_LAYOUTS, size_of
from zerotune.trial_lib.deepspeed_config.overrides import (
    ACCUMULATION,
    MICRO_BATCH,
    TRAIN_BATCH,
    overwrite_deepspeed_config,
    with_typed_sizes,
    without_tuning_keys,
)
from zerotune.trial_lib.device.this_host import kind_of
from zerotune.trial_lib.inputs.entrypoint import TRIAL_CLASS_MODULE, default_interpreter
from zerotune.trial_lib.inputs.launchers import launcher_named
from zerotune.trial_lib.inputs.places import is_variable, spelling, trial_command, typed_switch
from zerotune.trial_lib.inputs.program_code import leading_imports, module_file
from zerotune.trial_lib.inputs.read_experiment import Experiment
from zerotune.trial_lib.inputs.yaml_document import read_yaml
from zerotune.trial_lib.launch.processes.jit_builds import NAMED, OWN
from zerotune.trial_lib.launch.rank_starter import Program
from zerotune.trial_lib.launch.starters import rank_environment
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.measurement import ProgramProfile
from zerotune.trial_lib.messages.orders import SPEC_VARIABLE
from zerotune.trial_lib.messages.turned import COMPILE_PLACES, COMPILER, is_turned
from zerotune.trial_lib.records.switches import (
    PROGRAM,
    SwitchValue,
    is_option,
    is_switch,
    own_switches,
    place_of,
    text_of,
)
from zerotune.trial_lib.study.folder import can_be_written, data_folder
from zerotune.trial_lib.study.followed import rewrapped

# The user's program as a study knows it: from the experiment, and from the profile trial.


@dataclass(frozen=True)
class KnownProgram:
    """The user's program, as far as it is known."""

    # The user's DeepSpeed configuration, without the sections of tuners. If it is in the code, it is empty until the
    # profile trial has run. From then on it also has the section `program`, if there are switches, and `layouts`, if
    # some of them are layouts.
    base_config: dict[str, Any] = field(default_factory=dict)
    # The option, variable or place in a file that sets each DeepSpeed key
    arg_mappings: dict[str, str] = field(default_factory=dict)
    found: ProgramProfile | None = None  # what the profile trial found; None before it has run
    # The program's switches that are varied, by their places, with the values in the command as typed
    switches: Mapping[str, Any] = field(default_factory=dict)
    # The kinds of those switches that are layouts, by their places
    layouts: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, experiment: Experiment, environment: Mapping[str, str] | None = None) -> "KnownProgram":
        """The program before it has run. Without an environment, its switches are left out."""
        mappings = {str(key): target for key, target in experiment.config.arg_mappings.items()}
        switches = {} if environment is None else typed_switches(experiment, environment)
        requests = () if environment is None else experiment.requests
        layouts = {place_of(each.path): each.layout for each in requests if each.layout}
        return cls(without_tuning_keys(experiment.ds_config), mappings, switches=switches, layouts=layouts)

    def learned(self, found: ProgramProfile) -> "KnownProgram":
        """The program after its profile trial. The experiment's own statements go before what was found."""
        # An option that the program was seen to read a size from sets no other size.
        seen = {spelling(target): key for key, target in found.arg_mappings.items()}
        own = {key: target for key, target in self.arg_mappings.items() if seen.get(spelling(target), key) == key}
        mappings = {**found.arg_mappings, **own}
        config = completed_config(self.base_config, found)
        switches = learned_switches(self.switches, found)
        if switches:
            config[PROGRAM] = switches
        if self.layouts:
            config[LAYOUTS] = dict(self.layouts)
        return KnownProgram(config, mappings, found, switches, self.layouts)

    def on_ranks(self, count: int) -> "KnownProgram":
        """If some ranks divide a batch among them, all do."""
        if self.found is None or self.found.divided_among == 1:
            return self
        return replace(self, found=replace(self.found, divided_among=count))

    def own_config(self, experiment: Experiment) -> Mapping[str, Any]:
        """The user's DeepSpeed configuration as it is written: in the file, or else in the code."""
        in_code = None if self.found is None else self.found.ds_config
        return experiment.ds_config or in_code or {}

    def in_words(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A configuration as the command types its micro-batch, which ranks may divide among them."""
        among, size = 1 if self.found is None else self.found.divided_among, config.get(MICRO_BATCH)
        return {**config, MICRO_BATCH: size * among} if type(size) is int else dict(config)

    def in_file(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A configuration for a file. The Trainer compares its sizes with the argument, whatever arrives."""
        is_divided = self.found is not None and MICRO_BATCH in self.found.batch
        return with_typed_sizes(config, self.found.divided_among) if self.found and is_divided else dict(config)

    @property
    def imported_later(self) -> tuple[str, ...]:
        """Modules that ranks with other values of the switches import, and that the profile trial may not have."""
        return (COMPILER,) if any(place in COMPILE_PLACES for place in self.switches) else ()

    @property
    def is_batch_in_code(self) -> bool:
        """Whether Hugging Face's training arguments are in the code: the engine had them, and no option sets them."""
        return self.found is not None and MICRO_BATCH in self.found.batch and MICRO_BATCH not in self.arg_mappings


def learned_switches(switches: Mapping[str, Any], found: ProgramProfile) -> dict[str, Any]:
    """The values of the varied switches in the user's configuration, by their places.

    What was typed counts. The program's own value of a switch that ZeroTune turns, and the default of an option that
    was not typed, show when the program runs. None stands for one that was not typed. A boolean option is then off.
    """
    return own_switches(switches, found.switches, found.turnable)


def named_in(file: Path | None) -> Callable[[str], str]:
    """Names the place of a switch in an error: its line in the YAML file that varies it, or its flag (None)."""

    def named(place: str) -> str:
        if file is None:
            return f"--vary {place}"
        try:
            return read_yaml(file).where(("search_space", PROGRAM, place))
        except InputError:
            # The file may be gone by now, or edited.
            return f"{file}: {place}"

    return named


def require_switchable(typed: Mapping[str, Any], found: ProgramProfile | None, file: Path | None = None) -> None:
    """Raises InputError if the program lacks an option, refuses a value of it, or has a boolean one on by default."""
    named = named_in(file)
    for place, reason in ({} if found is None else found.refused_options).items():
        raise InputError(f"{reason}.", where=named(place), remedy="Vary what your program takes.")
    for place in typed if found is not None else ():
        if found is not None and typed[place] is False and found.switches.get(place) is True:
            as_text = f"--vary \"{place}='true','false'\"" if file is None else f"`\"{place}\": ['true', 'false']`"
            raise InputError(
                "your program's default of this option is true, so leaving it out does not turn it off.",
                where=named(place),
                remedy=f"Give the values as text, if the option takes one: {as_text}.",
            )


def varied_options(experiment: Experiment) -> dict[str, list[Any]]:
    """The options of a program that a search varies, each with the values to try."""
    places = ((place_of(each.path), each.values) for each in experiment.requests if is_switch(each.path))
    return {place: list(values) for place, values in places if is_option(place)}


def require_sizes(
    switches: Mapping[str, Any], layouts: Mapping[str, str], named: Callable[[str], str] | None = None
) -> None:
    """Raises InputError if a size of the user's own layout is neither typed nor a default that the parser shows."""
    named = named or named_in(None)
    for place, kind in layouts.items():
        if not size_of(switches.get(place)):
            raise InputError(
                f"the size of your own {kind} layout is not known, because your command does not set it.",
                where=named(place),
                remedy="Type it in your command as well.",
            )


def typed_switches(experiment: Experiment, environment: Mapping[str, str]) -> dict[str, Any]:
    """The values of the varied switches in an experiment's command as typed, by their places.

    That of a switch that ZeroTune turns is None, unless the experiment sets it. Raises InputError if a switch names a
    word, or a value in a file, that does not exist.
    """
    requests = [each for each in experiment.requests if is_switch(each.path)]
    arguments, folder = experiment.entrypoint.arguments, experiment.model_dir
    switches: dict[str, Any] = {}
    for request in requests:
        place = place_of(request.path)
        if is_turned(place):
            switches[place] = experiment.config.turned.get(place)
        else:
            typed = typed_switch(place, request.values, arguments, environment, folder)
            switches[place] = 1 if typed is None and place in VARIABLES_OF_LAYOUTS else typed
    return switches


def completed_config(base: Mapping[str, Any], program: ProgramProfile) -> dict[str, Any]:
    """The user's DeepSpeed configuration with the values that it leaves open, as far as they are known.

    The batch is that of the engine when the program ran as it was typed. So are the precision and the reduce bucket, if
    the configuration leaves them "auto".
    """
    config = dict(base) or overwrite_deepspeed_config(without_tuning_keys(program.ds_config or {}), {})
    config = _settled(config, program.settled)
    if program.typed_batch is None:
        return config
    config[MICRO_BATCH] = program.typed_batch.micro_batch_size
    config[ACCUMULATION] = program.typed_batch.gradient_accumulation_steps
    if TRAIN_BATCH in config:
        config[TRAIN_BATCH] = program.typed_batch.train_batch_size
    return config


def _settled(config: Mapping[str, Any], settled: Mapping[str, Any]) -> dict[str, Any]:
    # A configuration with each "auto" replaced by the value that the engine had, if that is known.
    return {
        key: settled[key]
        if value == "auto" and key in settled
        else _settled(value, settled[key])
        if isinstance(value, Mapping) and isinstance(settled.get(key), Mapping)
        else value
        for key, value in config.items()
    }


# The folder where ranks build DeepSpeed's operators: one for each environment that builds them differently.

# Variables that change the commands of a build (torch/utils/cpp_extension.py, deepspeed/ops/op_builder/builder.py).
_VARIABLES = (
    *("CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CUDA_HOME", "ROCM_HOME"),
    *("TORCH_CUDA_ARCH_LIST", "PYTORCH_ROCM_ARCH", "DS_ACCELERATOR", "PYTORCH_NVCC", "TORCH_DONT_CHECK_COMPILER_ABI"),
)
_PACKAGES = ("torch", "deepspeed")
_DIGITS = 12


def build_root(environment: Mapping[str, str]) -> Path:
    """The folder that torch builds extensions in."""
    named = environment.get(NAMED)
    # Path.home() raises if there is no home folder.
    home = environment.get("HOME") or os.path.expanduser("~")  # noqa: PTH111
    return Path(named) if named else Path(home, ".cache", "torch_extensions")


def with_build_folder(environment: Mapping[str, str], interpreter: str) -> dict[str, str]:
    """The environment of ranks, with ZeroTune's folder for the builds of their environment.

    A folder that the user names stays. If torch's folder cannot be written, ZeroTune's is in its own data folder. If
    that cannot be written either, torch's stays. A program that needs no operator still runs, and another one reports
    what it could not do.
    """
    if environment.get(NAMED):
        return dict(environment)
    name = f"{OWN}{_key(environment, interpreter)}"
    for root in (build_root(environment), data_folder() / "torch_extensions"):
        # Without a home folder ZeroTune has no folder either.
        if root.is_absolute() and can_be_written(root):
            return {**environment, NAMED: str(root / name)}
    return dict(environment)


def _key(environment: Mapping[str, str], interpreter: str) -> str:
    # A name for all that a build depends on. Source files that change are ninja's to notice.
    prefix = Path(interpreter).absolute().parent.parent
    # A virtual environment may take those of its base, and a user has some at home. Debian calls them dist-packages.
    base = Path(interpreter).resolve().parent.parent
    roots = (prefix, base, base / "local", Path(environment.get("HOME", base), ".local"))
    packages = [
        str(path)
        for root in dict.fromkeys(roots)
        for package in _PACKAGES
        for path in sorted(root.glob(f"lib*/python*/*-packages/{package}-*"))
    ]
    # Another version of ninja takes everything for outdated.
    ninja = shutil.which("ninja", path=environment.get("PATH"))
    ninja_file = () if ninja is None else (os.path.realpath(ninja), Path(ninja).stat().st_mtime_ns)
    variables = {name: environment.get(name, "") for name in _VARIABLES}
    whole = [str(prefix), packages, ninja_file, variables, _processor()]
    return hashlib.sha256(repr(whole).encode()).hexdigest()[:_DIGITS]


def _processor() -> list[str]:
    # What the compilers see of the processor. A home folder may be shared by hosts of several kinds.
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        lines = []
    return [platform.machine(), *(line for line in lines if line.startswith(("model name", "flags", "Features")))]


# The user's program as ranks run it: interpreter, environment and command line.


def program_of(
    experiment: Experiment,
    environment: dict[str, str],
    ds_config_path: Path,
    ds_config: Mapping[str, Any],
    training_spec: Path,
    arg_mappings: Mapping[Any, str] | None = None,
    as_typed: bool = False,
    switches: Mapping[str, SwitchValue] | None = None,
    check: Callable[[], None] = lambda: None,
) -> Program:
    """The program of an experiment under one DeepSpeed configuration. Without `arg_mappings`, the experiment's count.

    `training_spec` is the file that a trial class, or a script with the Core API, reads its task from. With `as_typed`
    the command stays as it is, but the configuration that it names is still replaced if the experiment overwrites a
    part of it. A trial class has variables alone as switches. `check` is called repeatedly while a wrapper runs once
    more, and its error ends the waiting. Raises InputError if with this configuration a wrapper starts another command,
    or none, and TimeoutError if it starts nothing for long.
    """
    entrypoint = experiment.entrypoint
    mappings = experiment.config.arg_mappings if arg_mappings is None else arg_mappings
    files: dict[str, str] = {}
    changes: list[tuple[str, str]] = []
    varied = variables_of(switches or {}, entrypoint.arguments, environment)
    before = environment
    if entrypoint.trial_class is not None:
        target, arguments = {"module": TRIAL_CLASS_MODULE}, [str(training_spec)]
        environment = {**environment, **varied}
    elif as_typed and not experiment.config.hyperparameters.overwrite_deepspeed_args:
        target, arguments = _target_of(experiment), list(entrypoint.arguments)
        environment = {**environment, SPEC_VARIABLE: str(training_spec)}
    else:
        target = _target_of(experiment)
        folder = experiment.model_dir
        entrypoint, mappings = rewrapped(entrypoint, ds_config_path, mappings, ds_config, folder, check)
        command = trial_command(entrypoint, ds_config_path, mappings, ds_config, environment, folder, switches)
        arguments, files, changes = command.arguments, command.files, command.changes
        environment = {**environment, **command.variables, SPEC_VARIABLE: str(training_spec)}
    return Program(
        interpreter=interpreter_of(experiment),
        target=target,
        arguments=arguments,
        local_rank_option=entrypoint.local_rank_option,
        model_dir=experiment.model_dir,
        environment=environment,
        launched_by=entrypoint.launched_by,
        files=files,
        changes=changes,
        # Libraries read some variables when they are imported, and the fork server has imported them.
        starts_cold=any(before.get(name) != value for name, value in varied.items()),
    )


def variables_of(
    switches: Mapping[str, SwitchValue], arguments: Sequence[str], environment: Mapping[str, str]
) -> dict[str, str]:
    return {
        place: text_of(value, environment.get(place, ""))
        for place, value in switches.items()
        if value is not None and is_variable(place, arguments)
    }


def _target_of(experiment: Experiment) -> dict[str, str]:
    entrypoint = experiment.entrypoint
    return {"module": entrypoint.module} if entrypoint.module else {"script": entrypoint.script or ""}


class CommandChanges:
    """Logs the changes that trials make in the user's command. All other words stay as typed.

    The first change of each word goes to the terminal, and every change to the log's file.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._told: set[str] = set()

    def tell(self, number: int, program: Program) -> None:
        for old, new in program.changes:
            what = old or re.split("[ =]", new)[0]
            is_known = what in self._told
            self._told.add(what)
            said = f"{old} -> {new}" if old else f"{new} is added"
            level = logging.DEBUG if is_known else logging.INFO
            self._log.log(level, "trial %04d, in the command: %s", number, said)


def leading_imports_of(experiment: Experiment, environment: Mapping[str, str]) -> list[str]:
    """The imports by which the user's code begins, for a fork server that runs them ahead."""
    entrypoint, folder = experiment.entrypoint, experiment.model_dir
    named = environment.get("PYTHONPATH", "").split(os.pathsep)
    folders = [folder, *(folder / each for each in named if each)]
    module = entrypoint.module or (entrypoint.trial_class or "").partition(":")[0]
    if "." in module:
        # Python runs the code of its packages before.
        return []
    file = module_file(module, folders) if module else folder / (entrypoint.script or "")
    # Python looks beside the script itself, if this is a link to it.
    return [] if file is None else leading_imports(file, [file.resolve().parent, *folders])


def interpreter_of(experiment: Experiment) -> str:
    """The Python that runs the user's code: the one that the command names by a path, or `default_interpreter`."""
    named = experiment.entrypoint.interpreter
    return default_interpreter() if named is None else str((experiment.model_dir / named).absolute())


def environment_of(experiment: Experiment, include: tuple[Path, ...], device: str) -> dict[str, str]:
    """The environment of ranks. `include` is what the code imports from outside the model directory."""
    interpreter = interpreter_of(experiment)
    environment = {
        **rank_environment(interpreter, has_one_thread(experiment, device)),
        **experiment.environment_variables,
        **experiment.entrypoint.launcher_environment,
    }
    environment = with_build_folder(environment, interpreter)
    if include:
        # Determined copies these files beside the code. Here ranks import them from where they are.
        folders = [str(path.resolve().parent) for path in include]
        environment["PYTHONPATH"] = os.pathsep.join([*folders, environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return environment


def has_one_thread(experiment: Experiment, device: str) -> bool:
    """Whether each rank gets one OpenMP thread if the user does not set a number.

    On a CPU a rank has one core. On GPUs ZeroTune does as the user's launcher does. `torchrun` sets one thread if it
    starts several processes (torch/distributed/run.py), and so does `accelerate launch`, because it starts torchrun.
    `deepspeed` and `python` leave all cores to each process, and an offloaded optimizer computes on them.
    """
    if kind_of(device).computes_on_the_processor:
        return True
    launcher = launcher_named(experiment.entrypoint.launched_by)
    return launcher.gives_one_thread and experiment.config.resources.slots_per_trial > 1
