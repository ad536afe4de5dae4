"""The user's program, and its ranks on given slots."""

from dataclasses import dataclass, field
from pathlib import Path

from trial_lib.command.launchers import launcher_named
from trial_lib.device.host.base import Host
from trial_lib.device.host.this_host import kind_of
from trial_lib.launch.rank_starter import RankRequest


@dataclass(frozen=True)
class Program:
    """What a trial runs: the user's program, the same for all trials of a study but for its arguments.

    Attributes:
        interpreter: the Python that runs it.
        target: `{"script": path}` or `{"module": name}`.
        arguments: of its command line.
        passes_local_rank: whether each rank is given `--local_rank=N` before them, as the `deepspeed` launcher does.
        model_dir: its working directory.
        environment: all of its environment variables, but for those of the rank.
        launched_by: the launcher that the user starts it by, as an `Entrypoint` has it.
        files: texts of files that its arguments name, by their paths: the trial's copies of the user's.
    """

    interpreter: str
    target: dict[str, str]
    arguments: list[str]
    passes_local_rank: bool
    model_dir: Path
    environment: dict[str, str]
    launched_by: str | None = None
    files: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class HostRanks:
    """The ranks on one host, of a trial that spans several.

    Attributes:
        first_rank: of the host.
        slots: of the host.
        world_size: ranks on all hosts.
        address: of the rendezvous.
        port: of the rendezvous.
    """

    first_rank: int
    slots: int
    world_size: int
    address: str
    port: int


def rank_requests(
    program: Program, host: Host, slots: list[str], port: int, logs: list[Path], part: HostRanks | None = None
) -> list[RankRequest]:
    """Returns one rank for each slot, in the environment that the program's launcher gives it, or else DeepSpeed's.

    `deepspeed` has variables that no other launcher sets (deepspeed/launcher/launch.py). By LOCAL_SIZE DeepSpeed takes
    each rank on a CPU for a device of its own, and keeps buffers of its collectives in shared memory.

    Args:
        program: what the ranks run.
        host: where.
        slots: one for each rank.
        port: of their rendezvous.
        logs: of each rank here.
        part: which ranks these are; None for all that there are.
    """
    part = part or HostRanks(0, len(slots), len(slots), "127.0.0.1", port)
    shared = {
        **program.environment,
        "WORLD_SIZE": str(part.world_size),
        "LOCAL_WORLD_SIZE": str(len(slots)),
        "MASTER_ADDR": part.address,
        "MASTER_PORT": str(port),
    }
    if launcher_named(program.launched_by).sets_local_size:
        # Every host has as many ranks.
        number, hosts = part.first_rank // len(slots), part.world_size // len(slots)
        shared |= {"LOCAL_SIZE": str(len(slots)), "CROSS_RANK": str(number), "CROSS_SIZE": str(hosts)}
    kind = kind_of(host.device)
    shared |= kind.environment(slots)
    return [
        RankRequest(
            environment={**shared, **_rank_variables(program, part, rank)},
            log=str(logs[rank]),
            cores=kind.cores(slots[rank]),
        )
        for rank in range(len(slots))
    ]


def _rank_variables(program: Program, part: HostRanks, rank: int) -> dict[str, str]:
    """Returns the variables that tell a rank which one it is, by all the names that its launcher has for them.

    Args:
        program: what it runs.
        part: which ranks are on this host.
        rank: its number here.
    """
    own, local = str(part.first_rank + rank), str(rank)
    numbers = {"rank": own, "local_rank": local, "ranks": str(part.world_size), "local_ranks": str(part.slots)}
    more = launcher_named(program.launched_by).rank_variables
    return {"RANK": own, "LOCAL_RANK": local, **{name: value.format(**numbers) for name, value in more.items()}}
