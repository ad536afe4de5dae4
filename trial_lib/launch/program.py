"""The user's program, and its ranks on given slots."""

from dataclasses import dataclass, field
from pathlib import Path

from trial_lib.device.base import Host
from trial_lib.device.this_host import kind_of
from trial_lib.inputs.launchers import launcher_named
from trial_lib.launch.rank_starter import RankRequest


@dataclass(frozen=True)
class Program:
    """The user's program. Only its arguments differ between the trials of a study."""

    interpreter: str  # the Python that runs it
    target: dict[str, str]  # `{"script": path}` or `{"module": name}`
    arguments: list[str]  # the arguments of its command line
    local_rank_option: str  # as `RankOrder` has it
    model_dir: Path  # its working directory
    environment: dict[str, str]  # all its environment variables, except those of the rank
    launched_by: str | None = None  # the name of the user's launcher, as in `Entrypoint`
    # The texts of the trial's copies of files that its arguments name, by their paths
    files: dict[str, str] = field(default_factory=dict)
    starts_cold: bool = False  # whether its ranks need new interpreters, because a trial varies an environment variable


@dataclass(frozen=True)
class HostRanks:
    first_rank: int  # the first rank on the host
    slots: int  # the number of ranks on the host
    world_size: int  # the number of ranks on all hosts
    address: str  # the address of the rendezvous
    port: int  # the port of the rendezvous


def rank_requests(
    program: Program, host: Host, slots: list[str], port: int, logs: list[Path], part: HostRanks | None = None
) -> list[RankRequest]:
    """Returns one rank for each slot, with the environment that the user's launcher would give it.

    `deepspeed` sets variables that no other launcher sets (deepspeed/launcher/launch.py). With LOCAL_SIZE, DeepSpeed
    takes each rank on a CPU for a device of its own, and its collectives use shared memory.
    """
    part = part or HostRanks(0, len(slots), len(slots), "127.0.0.1", port)
    shared = {
        **program.environment,
        "WORLD_SIZE": str(part.world_size),
        "LOCAL_WORLD_SIZE": str(len(slots)),
        "MASTER_ADDR": part.address,
        "MASTER_PORT": str(port),
    }
    launcher = launcher_named(program.launched_by)
    if launcher.sets_local_size:
        # All hosts have the same number of ranks.
        number, hosts = part.first_rank // len(slots), part.world_size // len(slots)
        shared |= {"LOCAL_SIZE": str(len(slots)), "CROSS_RANK": str(number), "CROSS_SIZE": str(hosts)}
    kind = kind_of(host.device)
    shared |= kind.environment(slots)
    requests = []
    for local, (slot, log) in enumerate(zip(slots, logs, strict=False)):
        own = part.first_rank + local
        numbers = {"rank": own, "local_rank": local, "ranks": part.world_size, "local_ranks": part.slots}
        # The same numbers by the other names that the launcher uses.
        more = {name: value.format(**numbers) for name, value in launcher.rank_variables.items()}
        environment = {**shared, "RANK": str(own), "LOCAL_RANK": str(local), **more}
        requests.append(RankRequest(environment, str(log), kind.cores(slot)))
    return requests
