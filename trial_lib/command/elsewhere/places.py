"""Programs that start a training where ZeroTune does not see it: schedulers, containers, hosts, sessions."""

from dataclasses import dataclass

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
    """Programs that start a command elsewhere.

    Attributes:
        programs: their names, each with the words behind it that start something. Alone, all words do.
        does: how a sentence goes on behind such words.
        instead: the user's remedy, a sentence.
        also_prepares: whether it often does other work than the training. Within a wrapper it then counts only if
            `StartedElsewhere.is_training`.
    """

    programs: dict[str, tuple[str, ...]]
    does: str
    instead: str
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
