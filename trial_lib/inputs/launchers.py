"""The launchers that users type to start ranks: their options, their records, and a launcher process.

A rank imports this module, so it imports neither pydantic nor torch.
"""

import base64
import binascii
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

# The options, and what becomes of each. ZeroTune starts the ranks in the launcher's place.


class Does(Enum):
    FOLLOWED = "it counts"
    LEFT_OUT = "ZeroTune decides it, and a note names it"
    ONE_NODE = "it has to ask for this node alone"
    REFUSED = "ZeroTune cannot do it"


@dataclass(frozen=True)
class Option:
    does: Does  # what becomes of it
    why: str = ""  # the reason, if it is left out or refused
    has_value: bool = True  # whether a value follows
    name: str = ""  # the name that it is returned by, if it has several


def followed(name: str = "", has_value: bool = True) -> Option:
    return Option(Does.FOLLOWED, has_value=has_value, name=name)


def left_out(why: str, has_value: bool = True) -> Option:
    return Option(Does.LEFT_OUT, why, has_value)


def refused(why: str, has_value: bool = True) -> Option:
    return Option(Does.REFUSED, why, has_value)


def _each(flags: str, option: Option) -> dict[str, Option]:
    return dict.fromkeys(flags.split(), option)


SLOTS = "resources.slots_per_trial says how many ranks start"
PORT = "every trial has a port of its own"
ONE_NODE = "a trial runs on one node"
LOGS = "every rank has a log of its own"
CORES = "ZeroTune hands out the cores"
NEVER_AGAIN = "a trial is never started again"
PROCESSES = "ZeroTune watches over the ranks"
_ELASTIC = "a trial has the same ranks from its beginning to its end; an elastic training may start from the answer"
NO_PYTHON = "ZeroTune starts Python programs only"

# Of `deepspeed/launcher/runner.py`, DeepSpeed 0.16 to 0.19.
DEEPSPEED: dict[str, Option] = {
    "--hostfile": followed(),
    "-H": followed("--hostfile"),
    "--include": followed(),
    "-i": followed("--include"),
    "--exclude": followed(),
    "-e": followed("--exclude"),
    "--num_gpus": followed(),
    "--num_accelerators": followed("--num_gpus"),
    "--module": followed(has_value=False),
    "--no_local_rank": followed(has_value=False),
    "--num_nodes": followed(),
    "--node_rank": Option(Does.ONE_NODE),
    "--master_port": left_out(PORT),
    "--master_addr": left_out(PORT),
    **_each("--launcher --launcher_args --ssh_port", left_out(ONE_NODE)),
    "--no_ssh": left_out(ONE_NODE, has_value=False),
    "--no_ssh_check": left_out(ONE_NODE, has_value=False),
    "--enable_each_rank_log": left_out(LOGS),
    "--log_level": left_out(LOGS),
    "--quiet": left_out(LOGS, has_value=False),
    "-q": left_out(LOGS, has_value=False),
    "--save_pid": left_out(PROCESSES, has_value=False),
    "--bind_cores_to_rank": left_out(CORES, has_value=False),
    "--bind_core_list": left_out(CORES),
    "--force_multi": refused("it asks for the launcher of several nodes", has_value=False),
    "--no_python": refused(NO_PYTHON, has_value=False),
    "--elastic_training": refused(_ELASTIC, has_value=False),
    **_each("--min_elastic_nodes --max_elastic_nodes", refused(_ELASTIC)),
    "--autotuning": refused("ZeroTune takes the place of DeepSpeed's autotuner"),
    "--venv_script": refused("no shell is started: activate the environment before zerotune"),
}

# A YAML says how many ranks start. Only a typed command chooses devices.
DEEPSPEED_IN_YAML: dict[str, Option] = {
    **{flag: option for flag, option in DEEPSPEED.items() if option.does is not Does.FOLLOWED},
    "--num_gpus": left_out(SLOTS),
    "--num_accelerators": left_out(SLOTS),
    "--num_nodes": Option(Does.ONE_NODE),
    "--module": DEEPSPEED["--module"],
    "--no_local_rank": DEEPSPEED["--no_local_rank"],
}

# Of `torch/distributed/run.py`, torch 2.13.
TORCHRUN: dict[str, Option] = {
    "--nproc_per_node": followed(),
    "--module": followed(has_value=False),
    "-m": followed("--module", has_value=False),
    "--nnodes": Option(Does.ONE_NODE),
    "--node_rank": Option(Does.ONE_NODE),
    "--standalone": left_out(ONE_NODE, has_value=False),
    **_each(
        "--master_port --master_addr --local_addr --rdzv_backend --rdzv_endpoint --rdzv_id --rdzv_conf", left_out(PORT)
    ),
    "--max_restarts": left_out(NEVER_AGAIN),
    **_each("--monitor_interval --start_method --signals_to_handle --shutdown_timeout", left_out(PROCESSES)),
    **_each(
        "--event_log_handler --role --log_dir --redirects -r --tee -t --local_ranks_filter "
        "--duplicate_stdout_filters --duplicate_stderr_filters --logs_specs",
        left_out(LOGS),
    ),
    "--numa_binding": left_out(CORES),
    "--no_python": refused(NO_PYTHON, has_value=False),
    "--run_path": refused("ZeroTune starts a script or a module", has_value=False),
    "--virtual_local_rank": refused("a rank finds its device by its LOCAL_RANK", has_value=False),
}
TORCHRUN_IN_YAML = {**TORCHRUN, "--nproc_per_node": left_out(SLOTS)}

DETERMINED: dict[str, Option] = {
    **DEEPSPEED_IN_YAML,
    **TORCHRUN_IN_YAML,
    "--trial": followed(),
    "--": followed(has_value=False),
}

_MPI = "the ranks are started without MPI"
_DEVICES = "ZeroTune hands out the devices"
_JOB = "the search runs in the allocation that there is"
_OTHER_FOLDER = "change to that folder before zerotune"

# Of Open MPI 4 and 5, and of MPICH's and Intel's Hydra.
MPIRUN: dict[str, Option] = {
    **_each("-np --np -n --n -c", followed("-np")),
    **_each("-npernode --npernode -ppn --ppn -perhost", followed("-npernode")),
    **_each("--hostfile -hostfile --machinefile -machinefile -f -hosts --hosts", refused("a search runs on this host")),
    **_each("--host -host -H", followed("--host")),
    **_each("-wdir --wdir -wd --wd", refused(_OTHER_FOLDER)),
    **_each("--bind-to -bind-to --map-by -map-by --rank-by -rank-by --cpu-set", left_out(CORES)),
    **_each("--prefix --timeout --launcher -launcher --output-filename --output", left_out(_MPI)),
    **_each(
        "--oversubscribe -oversubscribe --nooversubscribe --use-hwthread-cpus --report-bindings -report-bindings "
        "--allow-run-as-root -allow-run-as-root --tag-output -tag-output -l --timestamp-output --display-map "
        "--display-allocation --bind-to-core -q --quiet -v --verbose -genvall",
        left_out(_MPI, has_value=False),
    ),
    "-genvlist": followed(),
    "-genvnone": followed(has_value=False),
}

# Of Slurm 24.
SRUN: dict[str, Option] = {
    **_each("-n --ntasks", followed("--ntasks")),
    "--ntasks-per-node": followed(),
    "--export": followed(),
    **_each("-N --nodes", Option(Does.ONE_NODE, name="--nodes")),
    **_each("-G --gpus --gres --gpus-per-node --gpus-per-task --gpu-bind --tres-per-task", left_out(_DEVICES)),
    **_each("-c --cpus-per-task --cpu-bind --cpus-per-gpu --hint --threads-per-core -m", left_out(CORES)),
    "--distribution": left_out(CORES),
    **_each(
        "-p --partition -A --account -t --time -q --qos -J --job-name --mem --mem-per-cpu --mem-per-gpu -w "
        "--nodelist -x --exclude --jobid -C --constraint --reservation --network --signal --comment -W --wait "
        "--mpi",
        left_out(_JOB),
    ),
    **_each("--exclusive --overlap -s --oversubscribe -K --kill-on-bad-exit --pty -v", left_out(_JOB, has_value=False)),
    **_each("-o --output -e --error -i --input", left_out(LOGS)),
    **_each("-l --label -u --unbuffered -Q --quiet --verbose", left_out(LOGS, has_value=False)),
    **_each("-D --chdir", refused(_OTHER_FOLDER)),
    "--multi-prog": refused("it starts several programs", has_value=False),
    **_each(
        "--container --container-image --container-mounts --container-workdir",
        refused("start zerotune within the container"),
    ),
}

_ONE_RUN = "it makes an environment for one run, and a study has many: add the packages to the project"
_SECRETS = "ZeroTune has to know which variables are secret: export them before zerotune"

# Of `uv run`, uv 0.7.
UV_RUN: dict[str, Option] = {
    **_each(
        "--extra --no-extra --group --no-group --only-group --package --project --python -p --config-file "
        "--cache-dir --color --allow-insecure-host --trusted-host --index --default-index --index-url -i "
        "--extra-index-url --find-links -f --index-strategy --keyring-provider --resolution --prerelease "
        "--fork-strategy --exclude-newer --link-mode --config-setting --config-settings -C "
        "--no-build-isolation-package --no-build-package --no-binary-package --refresh-package "
        "--reinstall-package --upgrade-package -P",
        followed(),
    ),
    **_each(
        "--active --all-extras --all-groups --all-packages --dev --no-dev --only-dev --no-default-groups "
        "--no-editable --exact --inexact --no-sync --locked --frozen --no-project --no-env-file --no-index "
        "--no-sources --no-build --no-binary --no-build-isolation --compile-bytecode --compile --no-cache "
        "--no-cache-dir -n --no-config --refresh --reinstall --force-reinstall --upgrade -U --managed-python "
        "--no-managed-python --no-python-downloads --native-tls --offline --no-progress --quiet -q --verbose -v "
        "--module --",
        followed(has_value=False),
    ),
    "-m": followed("--module", has_value=False),
    **_each("--with -w --with-editable --with-requirements", refused(_ONE_RUN)),
    **_each("--isolated --script -s --gui-script", refused(_ONE_RUN, has_value=False)),
    "--env-file": refused(_SECRETS),
    "--directory": refused(_OTHER_FOLDER),
}


# The launchers that users type to start ranks, one record each.

TORCH_LAUNCH = "torch.distributed.launch"  # torchrun's older module
# The module by which DeepSpeed's launcher starts the ranks of one host.
DEEPSPEED_LAUNCH = "deepspeed.launcher.launch"


@dataclass(frozen=True)
class UserLauncher:
    name: str  # as `Entrypoint.launched_by` has it
    programs: tuple[str, ...]  # the words that begin it, such as `accelerate launch`. Texts show the first.
    # The function that reads the words behind them, as `module:function`. It takes the words, this record and the
    # interpreter beside the program. It returns fields of `Entrypoint`.
    read: str = "zerotune.trial_lib.inputs.entrypoint:read_counted"
    options: Mapping[str, Option] = field(default_factory=dict)  # what becomes of each of its options
    # The same in an experiment's YAML, which says itself how many ranks start. None if a YAML cannot name the launcher.
    yaml_options: Mapping[str, Option] | None = None
    # The options that say how many ranks start, for the readers that use them. The first that is typed counts.
    count: tuple[str, ...] = ()
    # The modules behind `python -m` that are the launcher, each with the words that belong to its name
    modules: tuple[str, ...] = ()
    comes_with_python: bool = False  # whether it is installed beside a Python, which then runs the ranks
    runs_command: bool = False  # whether a whole command follows, and not a Python script
    is_environment: bool = False  # whether it starts no ranks, and only runs the command in an environment of its own
    # Whether ranks find LOCAL_SIZE, CROSS_RANK and CROSS_SIZE, as DeepSpeed's launcher sets them. By LOCAL_SIZE
    # DeepSpeed takes each rank on a CPU for a device of its own.
    sets_local_size: bool = False
    gives_one_thread: bool = False  # whether it sets OMP_NUM_THREADS to 1 if it starts several ranks
    # Whether it ignores CUDA_VISIBLE_DEVICES if its options name devices or a number
    overrides_visible_devices: bool = False
    hands_over_config: bool = False  # whether it hands the program a DeepSpeed configuration that no argument names
    # More variables of each rank. `{rank}`, `{local_rank}`, `{ranks}` and `{local_ranks}` stand for numbers.
    rank_variables: Mapping[str, str] = field(default_factory=dict)
    # The function that types it with another DeepSpeed configuration, as `module:function`. It is called as
    # `accelerate.accelerate_words` is. Empty if the words stay as they are.
    retype: str = ""

    @property
    def shown(self) -> str:
        return self.programs[0]

    def begins(self, words: Sequence[str]) -> bool:
        """Returns whether words begin with the launcher, whatever folder its program is in."""
        named = [os.path.basename(words[0]), *words[1:]] if words else []  # noqa: PTH119 - a word, not a path
        return any(named[: len(spelled)] == spelled for spelled in map(str.split, self.programs))


# What holds if no launcher is typed. ZeroTune then starts ranks as `deepspeed` does.
NONE = UserLauncher(name="python", programs=("python", "python3"), comes_with_python=True, sets_local_size=True)

_RECORDS = (
    UserLauncher(
        name="deepspeed",
        programs=("deepspeed",),
        read="zerotune.trial_lib.inputs.entrypoint:read_deepspeed",
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
        read="zerotune.trial_lib.inputs.entrypoint:read_torchrun",
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
        read="zerotune.trial_lib.inputs.accelerate:read_accelerate",
        modules=("accelerate.commands.launch", "accelerate.commands.accelerate_cli launch", "accelerate launch"),
        comes_with_python=True,
        gives_one_thread=True,  # It starts torchrun.
        hands_over_config=True,
        retype="zerotune.trial_lib.inputs.accelerate:accelerate_words",
    ),
    UserLauncher(
        name="mpirun",
        programs=("mpirun", "mpiexec", "orterun"),
        read="zerotune.trial_lib.inputs.entrypoint:read_mpirun",
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
        read="zerotune.trial_lib.inputs.entrypoint:read_srun",
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
        read="zerotune.trial_lib.inputs.program_code:read_uv_run",
        options=UV_RUN,
        runs_command=True,
        is_environment=True,
    ),
)
# Every launcher by its name. Texts list them in this order.
LAUNCHERS: dict[str, UserLauncher] = {launcher.name: launcher for launcher in _RECORDS}


def launcher_named(name: str | None) -> UserLauncher:
    return NONE if name is None else LAUNCHERS[name]


def launcher_of(words: Sequence[str]) -> UserLauncher | None:
    return next((launcher for launcher in LAUNCHERS.values() if launcher.begins(words)), None)


def launcher_of_program(program: str) -> UserLauncher | None:
    """Returns the launcher that a program belongs to, by the program's name alone: `accelerate` without `launch`."""
    return next((launcher for launcher in LAUNCHERS.values() if program in first_words(launcher)), None)


def launcher_of_module(module: str) -> UserLauncher | None:
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
    """Leaves out the words behind them: `accelerate` without `launch`."""
    return firsts(launcher.programs)


def firsts(spellings: Sequence[str]) -> tuple[str, ...]:
    return tuple(spelled.split()[0] for spelled in spellings)


def python_programs() -> tuple[str, ...]:
    return tuple(
        program
        for launcher in (NONE, *LAUNCHERS.values())
        if launcher.comes_with_python
        for program in first_words(launcher)
    )


def all_modules() -> Iterator[str]:
    for launcher in LAUNCHERS.values():
        yield from launcher.modules


def launchers_listed() -> str:
    *others, last = (launcher.shown for launcher in LAUNCHERS.values())
    return f"{', '.join(others)} or {last}"


# A launcher process, recognised by its command line.

_PYTHON = re.compile(r"python[\d.]*")
# A launcher with one of these options prints and exits. It starts no rank.
_ABOUT_ITSELF = ("--version", "-V", "-version", "--help", "-h")
_WORLD = "--world_info"
# DeepSpeed's launcher adds these itself, and tells the module its hosts and devices in base64.
_ITS_OWN = ("--node_rank", "--master_addr", "--save_pid", "--enable_each_rank_log")
_SWITCHES = ("--module", "--no_python", "--no_local_rank", "--bind_cores_to_rank", "--quiet", "-q")
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def launcher_in(words: Sequence[str]) -> list[str] | None:
    """Returns the command of a launcher, as a user may type it; None for any other process.

    Example:
        >>> launcher_in(["/opt/env/bin/python", "/opt/env/bin/torchrun", "--nproc_per_node", "2", "train.py"])
        ['/opt/env/bin/torchrun', '--nproc_per_node', '2', 'train.py']
    """
    if not words or (len(words) > 1 and words[-1] in _ABOUT_ITSELF and _ends_as_launcher(words[-2])):
        return None
    if not is_python(words[0]):
        return list(words) if _starts_ranks(words) else None
    position = python_target(words)
    if position is None:
        return None
    if words[position - 1] != "-m":
        script = words[position:]
        return list(script) if _starts_ranks(script) else None
    for launcher in LAUNCHERS.values():
        for module in launcher.modules:
            named = module.split()
            if list(words[position : position + len(named)]) == named:
                started = runner_words(words[position + 1 :]) if module == DEEPSPEED_LAUNCH else None
                if started is not None:
                    return [words[0], "-m", launcher.modules[0], *started]
                # A module with a subcommand is typed by the module that the subcommand is.
                typed = launcher.modules[0] if len(named) > 1 else module
                return [words[0], "-m", typed, *words[position + len(named) :]]
    return None


def runner_words(words: Sequence[str]) -> list[str] | None:
    """Returns the words of `deepspeed.launcher.runner` that start the same ranks as `deepspeed.launcher.launch`.

    Args:
        words: behind the name of the module. None is returned for several hosts.

    Example:
        >>> runner_words(["--world_info=eyJsb2NhbGhvc3QiOiBbMCwgMV19", "train.py", "--lr", "0.1"])
        ['--num_gpus', '2', 'train.py', '--lr', '0.1']
    """
    rest, kept, world = list(words), [], ""
    while rest and rest[0].startswith("-"):
        flag, equals, value = rest.pop(0).partition("=")
        if not equals and flag not in _SWITCHES and rest:
            value = rest.pop(0)
        if flag == _WORLD:
            world = value
        elif flag not in _ITS_OWN:
            kept += [flag] if flag in _SWITCHES else [flag, value]
    try:
        hosts: dict[str, list[int]] = json.loads(base64.urlsafe_b64decode(world))
        ((_, devices),) = hosts.items()
    except (binascii.Error, ValueError, AttributeError):
        return None
    if devices == list(range(len(devices))):
        chosen = ["--num_gpus", str(len(devices))]
    else:
        chosen = ["--include", "localhost:" + ",".join(map(str, devices))]
    return [*chosen, *kept, *rest]


def is_python(program: str) -> bool:
    return _PYTHON.fullmatch(_name(program)) is not None


def python_target(words: Sequence[str]) -> int | None:
    """Returns the position of the script or module in a Python process's command line; None if it runs neither."""
    if not words or not is_python(words[0]):
        return None
    position = 1
    while position < len(words):
        word = words[position]
        if word == "-m":
            return position + 1 if position + 1 < len(words) else None
        if word in ("-c", "-"):
            return None
        if not word.startswith("-"):
            return position
        position += 2 if word in _WITH_VALUE else 1
    return None


def _starts_ranks(words: Sequence[str]) -> bool:
    launcher = launcher_of(words)
    return launcher is not None and not launcher.is_environment


def _ends_as_launcher(word: str) -> bool:
    programs = (program for launcher in LAUNCHERS.values() for program in launcher.programs)
    return (
        _name(word) in {spelled.split()[-1] for spelled in (*programs, *all_modules())}
        or launcher_of([word]) is not None
    )


def _name(path: str) -> str:
    return os.path.basename(path)  # noqa: PTH119 - of a program of whatever system
