"""Commands that start a training where ZeroTune does not see it: schedulers, containers, other hosts."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from zerotune.trial_lib.inputs.launchers import launcher_of, python_programs
from zerotune.trial_lib.inputs.words import ASSIGNMENT

_IN_THE_JOB = (
    "Write `zerotune tune --` into the job, before the command that starts your ranks (such as `zerotune tune -- srun "
    "python train.py`), and submit that job without zerotune."
)
_IN_THE_TASK = (
    "Write `zerotune tune --` into the task, before the command that starts your ranks, and start that task without "
    "zerotune."
)
_ANYTHING = ("",)


@dataclass(frozen=True)
class Elsewhere:
    # Their names, each with the words behind it that start something. Alone, all words do.
    programs: dict[str, tuple[str, ...]]
    does: str  # how a sentence goes on behind such words
    instead: str  # the user's remedy, a sentence
    # Whether it often does other work than the training. Within a wrapper it then counts only if
    # `StartedElsewhere.is_training`.
    also_prepares: bool = False


_DOCKER = ("run", "exec", "start", "compose up", "compose run", "compose exec", "container run", "container exec")
_APPTAINER = ("exec", "run", "shell", "instance start")
_KUBECTL = ("apply", "create", "replace", "run", "exec")

KINDS = (
    Elsewhere(
        {
            **dict.fromkeys(("sbatch", "qsub", "bsub", "msub", "oarsub", "condor_submit", "pjsub", "jsub"), _ANYTHING),
            "flux": ("batch", "submit", "run", "alloc", "mini"),
        },
        "submits a job, which ZeroTune would not see",
        _IN_THE_JOB,
    ),
    Elsewhere(
        dict.fromkeys(("salloc", "qrsh", "qlogin"), _ANYTHING),
        "starts its command in an allocation, and zerotune has to run within it",
        "Type it behind: `salloc OPTIONS zerotune tune -- srun python train.py`.",
    ),
    Elsewhere(
        {
            **dict.fromkeys(("docker", "podman", "nerdctl"), _DOCKER),
            **dict.fromkeys(("docker-compose", "podman-compose"), ("up", "run", "exec")),
            **dict.fromkeys(("apptainer", "singularity"), _APPTAINER),
            **dict.fromkeys(("enroot", "sarus", "udocker", "pcocc"), ("start", "run", "exec")),
            **dict.fromkeys(("shifter", "ch-run", "systemd-nspawn"), _ANYTHING),
            **dict.fromkeys(("lxc", "incus"), ("exec", "launch")),
            **dict.fromkeys(("ctr", "crictl"), ("run", "exec", "tasks exec")),
            **dict.fromkeys(("toolbox", "distrobox"), ("run", "enter")),
            "cog": ("run", "train", "exec"),
            "devcontainer": ("up", "exec"),
        },
        "starts its command in a container, which ZeroTune would not see",
        "Install ZeroTune in the image, and type it behind the image's name: `docker run OPTIONS IMAGE zerotune tune "
        "-- COMMAND`.",
        also_prepares=True,
    ),
    Elsewhere(
        {
            **dict.fromkeys(("kubectl", "oc"), _KUBECTL),
            "helm": ("install", "upgrade"),
            "argo": ("submit",),
            "sky": ("launch", "exec", "jobs launch", "spot launch", "serve up"),
            "ray": ("job submit", "submit", "exec"),
            "modal": ("run", "deploy"),
            "dstack": ("apply", "run"),
            "det": ("experiment create", "e create", "command run", "cmd run", "shell start", "shell open"),
            "runai": ("submit", "training submit", "workspace submit"),
            "torchx": ("run",),
            "anyscale": ("job submit",),
            "mcli": ("run",),
            "gantry": ("run",),
            "beaker": ("experiment create", "session create"),
            "ngc": ("batch run", "base-command run"),
            "pyflyte": ("run",),
            "aws": ("sagemaker create-training-job", "batch submit-job", "ecs run-task", "ec2 run-instances"),
            "gcloud": ("custom-jobs create", "jobs submit", "compute ssh", "tpu-vm ssh"),
            "az": ("ml job create", "ml job", "batch task create", "container create"),
            "databricks": ("jobs submit", "jobs run-now"),
        },
        "starts its command on other machines, which ZeroTune would not see",
        _IN_THE_TASK,
    ),
    Elsewhere(
        dict.fromkeys(("ssh", "mosh", "pdsh", "dsh", "clush", "pssh", "parallel-ssh"), _ANYTHING),
        "starts its command on another host, which ZeroTune would not see",
        "Type zerotune there: `ssh HOST 'cd FOLDER && zerotune tune -- COMMAND'`. Several hosts are trained on by "
        "`deepspeed --hostfile FILE`.",
        also_prepares=True,
    ),
    Elsewhere(
        {
            "tmux": ("new", "new-session", "new-window", "neww", "split-window", "send-keys", "send", "respawn-pane"),
            **dict.fromkeys(("screen", "at", "batch", "systemd-run", "tsp", "dtach", "abduco"), _ANYTHING),
            "zellij": ("run", "action"),
            "pueue": ("add",),
            "pm2": ("start",),
        },
        "starts its command in a session of its own, which ZeroTune would not see",
        "Type zerotune within it: `tmux new 'zerotune tune -- COMMAND'`.",
        also_prepares=True,
    ),
)


# Finding in a command what starts the training elsewhere.


# They run the command that follows, here.
_PREFIXES = frozenset(
    (
        *("env", "nohup", "time", "sudo", "doas", "nice", "ionice", "chrt", "timeout", "stdbuf", "setsid", "exec"),
        *("command", "numactl", "taskset", "unbuffer", "systemd-inhibit", "uv", "poetry", "pixi", "pdm", "hatch"),
        *("conda", "mamba", "micromamba", "mpirun", "mpiexec", "orterun", "srun"),
    )
)
# They change PATH, so that a wrapper's shims do not see the command behind them.
OTHER_USER = ("sudo", "doas")
_ORDINARY_WORDS = ("at", "batch", "screen")  # which may be the value of a prefix's option
_MPI = ("mpirun", "mpiexec", "orterun")  # `-bootstrap ssh`, `--mca plm_rsh_agent ssh`: how they reach other hosts
# Names that mean the program, in whatever text they stand.
UNMISTAKABLE = (
    *("sbatch", "salloc", "qsub", "bsub", "condor_submit", "docker", "podman", "apptainer", "singularity"),
    "kubectl",
)
_SHELLS = ("sh", "bash", "zsh", "dash", "ksh")
_ABOUT_ITSELF = frozenset(("--version", "-V", "--help", "-h", "help", "version", "--test-only"))
_GPUS = ("--gpus", "--nv", "--rocm", "--runtime", "--device")
_MOVE_FILES = ("rsync", "git-upload-pack", "git-receive-pack", "scp", "sftp")  # by ssh
_MOST_WORDS_BEFORE = 5  # values of options that stand between a program and its subcommand


@dataclass(frozen=True)
class StartedElsewhere:
    shown: str  # the words that do, such as `docker run`
    kind: Elsewhere  # what they do
    is_training: bool  # whether they name a Python, a launcher, a script or GPUs, or start services and stay

    @property
    def what(self) -> str:
        return f"{self.shown} {self.kind.does}."


def started_elsewhere(words: Sequence[str]) -> StartedElsewhere | None:
    """Returns what in a command starts another elsewhere, behind prefixes such as `env X=1`, `sudo` or `bash -c`.

    Example:
        >>> started_elsewhere(["nohup", "docker", "--context", "gpu", "run", "image"]).shown
        'docker run'
    """
    is_behind_prefix = True
    for position, word in enumerate(words):
        program = _name(word)
        is_value = program == "ssh" and any(_name(each) in _MPI for each in words[:position])
        is_value |= program in _ORDINARY_WORDS and not is_behind_prefix
        found = None if is_value else _here(words[position:])
        if found is not None:
            return found
        if program in _SHELLS:
            return _in_shell(words[position + 1 :])
        if program in python_programs() or (position == 0 and program not in _PREFIXES and not ASSIGNMENT.match(word)):
            return None
        is_behind_prefix = program in _PREFIXES or ASSIGNMENT.match(word) is not None
    return None


def programs_elsewhere() -> list[str]:
    return [program for kind in KINDS for program in kind.programs]


def _here(words: Sequence[str]) -> StartedElsewhere | None:
    program, rest = _name(words[0]), words[1:]
    kind = next((kind for kind in KINDS if program in kind.programs), None)
    is_users_own = words[0].startswith(("./", "../"))
    if kind is None or launcher_of(words) is not None or is_users_own or (rest and rest[0] in _ABOUT_ITSELF):
        return None
    plain = [word for word in rest if not word.startswith("-")][:_MOST_WORDS_BEFORE]
    for spelled in kind.programs[program]:
        following = iter(plain)
        if all(word in following for word in spelled.split()):
            return StartedElsewhere(f"{program} {spelled}".rstrip(), kind, _is_training(rest))
    return None


def _in_shell(words: Sequence[str]) -> StartedElsewhere | None:
    # What the command behind a shell's `-c` starts elsewhere.
    at = next((at for at, word in enumerate(words) if word.startswith("-") and word.endswith("c")), None)
    if at is None or at + 1 >= len(words):
        return None
    return next((found for part in _commands(words[at + 1]) if (found := started_elsewhere(part)) is not None), None)


def _commands(text: str) -> list[list[str]]:
    lexer = shlex.shlex(text.replace("\n", ";"), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    parts: list[list[str]] = [[]]
    try:
        for word in lexer:
            if set(word) <= set("();<>|&") or word in ("then", "do", "else", "{", "!"):
                parts.append([])
            else:
                parts[-1].append(word)
    except ValueError:  # an open quote
        return []
    return [part for part in parts if part]


def _is_training(words: Sequence[str]) -> bool:
    each = [part for word in words for part in (word, *word.split())]
    if "up" in words and "-d" not in words and "--detach" not in words:
        return True
    if any(part in _MOVE_FILES for part in each):
        return False
    return any(
        part.startswith(_GPUS)
        or part.endswith((".py", ".sh"))
        or _name(part) in python_programs()
        or launcher_of([part]) is not None
        for part in each
    )


def _name(word: str) -> str:
    return os.path.basename(word)  # noqa: PTH119 - a word, not a path
