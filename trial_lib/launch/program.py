"""The user's program, and its ranks on given slots."""

from dataclasses import dataclass
from pathlib import Path

from trial_lib.launch.hardware import Host
from trial_lib.launch.launcher import RankRequest


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
    """

    interpreter: str
    target: dict[str, str]
    arguments: list[str]
    passes_local_rank: bool
    model_dir: Path
    environment: dict[str, str]


def rank_requests(program: Program, host: Host, slots: list[str], port: int, logs: list[Path]) -> list[RankRequest]:
    """Returns one rank for each slot, in the environment that torch's and DeepSpeed's launchers give it."""
    world_size = len(slots)
    shared = {
        **program.environment,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if host.device == "cuda":
        # As NVML counts them, which names the slots.
        shared["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        shared["CUDA_VISIBLE_DEVICES"] = ",".join(slots)
    return [
        RankRequest(
            environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            log=str(logs[rank]),
            cores=[int(slots[rank])] if host.device == "cpu" else [],
        )
        for rank in range(world_size)
    ]
