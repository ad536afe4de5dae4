"""The launchers that users type to start ranks, one record each.

To add a launcher, write a `UserLauncher` and put it into `LAUNCHERS`. Reading a command, its ranks' variables, the
messages, the help and the command to train with follow from the record.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from trial_lib.command.launcher_options import (
    DEEPSPEED,
    DEEPSPEED_IN_YAML,
    MPIRUN,
    SRUN,
    TORCHRUN,
    TORCHRUN_IN_YAML,
    UV_RUN,
    Option,
)

TORCH_LAUNCH = "torch.distributed.launch"
"""torchrun's older module."""
DEEPSPEED_LAUNCH = "deepspeed.launcher.launch"
"""The module by which DeepSpeed's launcher starts the ranks of one host."""


@dataclass(frozen=True)
class UserLauncher:
    """A launcher.

    Attributes:
        name: as `Entrypoint.launched_by` has it.
        programs: the words that begin it, such as `accelerate launch`. Texts show the first.
        read: the function that reads the words behind them, as `module:function`. It takes the words, this record and
            the interpreter beside the program. It returns fields of `Entrypoint`.
        options: what becomes of each of its options.
        yaml_options: the same in an experiment's YAML, which says itself how many ranks start. None if a YAML cannot
            name the launcher.
        count: the options that say how many ranks start, for the readers that use them. The first that is typed counts.
        modules: the modules behind `python -m` that are the launcher, each with the words that belong to its name.
        comes_with_python: whether it is installed beside a Python, which then runs the ranks.
        runs_command: whether a whole command follows, and not a Python script.
        is_environment: whether it starts no ranks, and only runs the command in an environment of its own.
        sets_local_size: whether ranks find LOCAL_SIZE, CROSS_RANK and CROSS_SIZE, as DeepSpeed's launcher sets them. By
            LOCAL_SIZE DeepSpeed takes each rank on a CPU for a device of its own.
        gives_one_thread: whether it sets OMP_NUM_THREADS to 1 if it starts several ranks.
        overrides_visible_devices: whether it ignores CUDA_VISIBLE_DEVICES if its options name devices or a number.
        hands_over_config: whether it hands the program a DeepSpeed configuration that no argument names.
        rank_variables: more variables of each rank. `{rank}`, `{local_rank}`, `{ranks}` and `{local_ranks}` stand for
            numbers.
        retype: the function that types it with another DeepSpeed configuration, as `module:function`. It is called as
            `accelerate_rewrite.accelerate_words` is. Empty if the words stay as they are.
    """

    name: str
    programs: tuple[str, ...]
    read: str = "trial_lib.command.cluster_launchers:read_counted"
    options: Mapping[str, Option] = field(default_factory=dict)
    yaml_options: Mapping[str, Option] | None = None
    count: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    comes_with_python: bool = False
    runs_command: bool = False
    is_environment: bool = False
    sets_local_size: bool = False
    gives_one_thread: bool = False
    overrides_visible_devices: bool = False
    hands_over_config: bool = False
    rank_variables: Mapping[str, str] = field(default_factory=dict)
    retype: str = ""

    @property
    def shown(self) -> str:
        """The words that texts call it by."""
        return self.programs[0]

    def begins(self, words: Sequence[str]) -> bool:
        """Returns whether words begin with the launcher, whatever folder its program is in."""
        named = [os.path.basename(words[0]), *words[1:]] if words else []  # noqa: PTH119 - a word, not a path
        return any(named[: len(spelled)] == spelled for spelled in map(str.split, self.programs))


NONE = UserLauncher(name="python", programs=("python", "python3"), comes_with_python=True, sets_local_size=True)
"""What holds if no launcher is typed. ZeroTune then starts ranks as `deepspeed` does."""

_RECORDS = (
    UserLauncher(
        name="deepspeed",
        programs=("deepspeed",),
        read="trial_lib.command.launcher_readers:read_deepspeed",
        options=DEEPSPEED,
        yaml_options=DEEPSPEED_IN_YAML,
        modules=("deepspeed.launcher.runner", DEEPSPEED_LAUNCH),
        comes_with_python=True,
        sets_local_size=True,
        overrides_visible_devices=True,
    ),
    UserLauncher(
        name="torchrun",
        programs=("torchrun",),
        read="trial_lib.command.launcher_readers:read_torchrun",
        options=TORCHRUN,
        yaml_options=TORCHRUN_IN_YAML,
        modules=("torch.distributed.run", TORCH_LAUNCH),
        comes_with_python=True,
        gives_one_thread=True,  # torch/distributed/run.py
        rank_variables={
            # By the run's id Lightning and torch know that torchrun started them. The ranks have a store of their own.
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "ROLE_NAME": "default",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_RANK": "{rank}",
            "ROLE_WORLD_SIZE": "{ranks}",
        },
    ),
    UserLauncher(
        name="accelerate",
        programs=("accelerate launch", "accelerate-launch"),
        read="trial_lib.command.accelerate_launch:read_accelerate",
        modules=("accelerate.commands.launch", "accelerate.commands.accelerate_cli launch", "accelerate launch"),
        comes_with_python=True,
        gives_one_thread=True,  # It starts torchrun.
        hands_over_config=True,
        retype="trial_lib.command.accelerate_rewrite:accelerate_words",
    ),
    UserLauncher(
        name="mpirun",
        programs=("mpirun", "mpiexec", "orterun"),
        read="trial_lib.command.cluster_launchers:read_mpirun",
        options=MPIRUN,
        count=("-np", "-npernode"),
        runs_command=True,
        rank_variables={
            "OMPI_COMM_WORLD_RANK": "{rank}",
            "OMPI_COMM_WORLD_LOCAL_RANK": "{local_rank}",
            "OMPI_COMM_WORLD_SIZE": "{ranks}",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "{local_ranks}",
            "PMI_RANK": "{rank}",
            "PMI_SIZE": "{ranks}",
        },
    ),
    UserLauncher(
        name="srun",
        programs=("srun",),
        read="trial_lib.command.cluster_launchers:read_srun",
        options=SRUN,
        count=("--ntasks", "--ntasks-per-node"),
        runs_command=True,
        rank_variables={
            "SLURM_PROCID": "{rank}",
            "SLURM_LOCALID": "{local_rank}",
            "SLURM_NODEID": "0",
            "SLURM_NTASKS": "{ranks}",
            "SLURM_NPROCS": "{ranks}",
            "SLURM_STEP_NUM_TASKS": "{ranks}",
        },
    ),
    UserLauncher(
        name="uv",
        programs=("uv run",),
        read="trial_lib.command.uv_run:read_uv_run",
        options=UV_RUN,
        runs_command=True,
        is_environment=True,
    ),
)
LAUNCHERS: dict[str, UserLauncher] = {launcher.name: launcher for launcher in _RECORDS}
"""Every launcher by its name. Texts list them in this order."""


def launcher_named(name: str | None) -> UserLauncher:
    """Returns the record of `Entrypoint.launched_by`."""
    return NONE if name is None else LAUNCHERS[name]


def launcher_of(words: Sequence[str]) -> UserLauncher | None:
    """Returns the launcher that a command begins with."""
    return next((launcher for launcher in LAUNCHERS.values() if launcher.begins(words)), None)


def launcher_of_program(program: str) -> UserLauncher | None:
    """Returns the launcher that a program belongs to, by the program's name alone: `accelerate` without `launch`."""
    return next((launcher for launcher in LAUNCHERS.values() if program in first_words(launcher)), None)


def launcher_of_module(module: str) -> UserLauncher | None:
    """Returns the launcher that is a module, by the module's name alone."""
    return next((launcher for launcher in LAUNCHERS.values() if module in firsts(launcher.modules)), None)


def is_environment_from(words: Sequence[str]) -> bool:
    """Returns whether a command, or a command that it starts, runs in an environment of a launcher's own."""
    for position, word in enumerate(words):
        launcher = launcher_of(words[position:])
        if launcher is not None and launcher.is_environment:
            return True
        if word in python_programs():
            # The words of a script follow.
            return False
    return False


def first_words(launcher: UserLauncher) -> tuple[str, ...]:
    """Returns the programs of a launcher without the words behind them."""
    return firsts(launcher.programs)


def firsts(spellings: Sequence[str]) -> tuple[str, ...]:
    """Returns the first word of each spelling."""
    return tuple(spelled.split()[0] for spelled in spellings)


def python_programs() -> tuple[str, ...]:
    """Returns the programs that are a Python or come with one."""
    return tuple(
        program
        for launcher in (NONE, *LAUNCHERS.values())
        if launcher.comes_with_python
        for program in first_words(launcher)
    )


def all_modules() -> Iterator[str]:
    """Yields every module of a launcher, each with the words that belong to its name."""
    for launcher in LAUNCHERS.values():
        yield from launcher.modules


def launchers_listed() -> str:
    """Returns the launchers as a sentence names them."""
    *others, last = (launcher.shown for launcher in LAUNCHERS.values())
    return f"{', '.join(others)} or {last}"
