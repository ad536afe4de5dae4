"""Simulates one run of a program: one process, rank 0 of a pretended world, with a deadline.

    starter = starter_for(program, folder, note)
    run = simulate(program, {"zero_optimization": {"stage": 3}}, Pretended(world=64, ranks_per_host=8), folder, starter)

Further runs of a warm starter are forks that have imported torch already.
"""

import json
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from zerotune.trial_lib.inputs.launchers import launcher_named
from zerotune.trial_lib.launch.rank_starter import (
    Launches,
    LaunchRequest,
    ProcessesEnd,
    Program,
    RankRequest,
    StarterClosedError,
)
from zerotune.trial_lib.launch.starters import WarmStarter
from zerotune.trial_lib.launch.trial_files import hidden_folders, layer_for, put_away
from zerotune.trial_lib.messages import orders
from zerotune.trial_lib.messages.files import make_own, make_own_folder
from zerotune.trial_lib.messages.foreseen_run import CAPABILITY, CUDA_PACKAGES, DEVICE_NAME, ForeseenRun, ForeseeOrder
from zerotune.trial_lib.messages.turned import turned_among
from zerotune.trial_lib.records.switches import PROGRAM, deepspeed_part, switches_of

ENTRY = "zerotune.trial_lib.plan.simulate.rank:run"
"""The function that the rank calls."""

DEADLINE_S = 180.0
"""Seconds that a program has for its steps, unless the caller says otherwise."""

_DEVICE_BYTES = 80 * 10**9
_GRACE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Pretended:
    world: int  # ranks
    ranks_per_host: int  # of these, the ranks on one host
    device_bytes: int = _DEVICE_BYTES  # memory of a device, for a program that asks
    device_name: str = DEVICE_NAME  # of a device, likewise
    capability: float = CAPABILITY  # its compute capability, likewise


def starter_for(
    program: Program, folder: Path, note: Callable[[str], None], leading: Sequence[str] = ()
) -> WarmStarter:
    """A starter for simulated runs, whose fork server already starts. Its owner closes it.

    Its log is in `folder`. `leading` are statements by which the program begins, which import modules.
    """
    make_own_folder(folder)
    environment = {**program.environment, **_WITHOUT_DEVICES}
    log = str(folder / "foresee-server.log")
    starter = WarmStarter(program.interpreter, [], environment, log, note, leading=leading, without=CUDA_PACKAGES)
    starter.start()
    return starter


def simulate(
    program: Program,
    overrides: Mapping[str, Any],
    pretended: Pretended,
    folder: Path,
    starter: Launches,
    deadline_s: float = DEADLINE_S,
    steps: int = 2,
    varied_options: Mapping[str, Sequence[Any]] | None = None,
) -> ForeseenRun:
    """Runs a program under fake tensors, and returns the record of its steps.

    `overrides` are merged into the DeepSpeed configuration of the engine that trains. Their section `program` has the
    program's switches. The rank turns those that it turns, and the program's arguments have the others.
    `varied_options` are the options that a search varies, with the values to try. The run's facts have what the
    program's own parser says of them. The files in `folder` are removed, except for a log of a run that was stopped.

    The run's configuration has the switches too, because they belong to its arm. Its `stopped` is not empty if the
    program cannot be foreseen.
    """
    make_own_folder(folder)
    own = Path(tempfile.mkdtemp(dir=folder, prefix="foreseen-"))
    scratch, result, log = own / "scratch", own / "run.json", own / "rank.log"
    scratch.mkdir(mode=0o700)
    make_own(log)
    order = ForeseeOrder(
        program=program.target,
        local_rank_option=program.local_rank_option,
        arguments=program.arguments,
        model_dir=str(program.model_dir),
        scratch=str(scratch),
        protected_before=time.time(),
        overrides=deepspeed_part(overrides),
        turned=turned_among(switches_of(overrides)),
        varied_options={place: list(values) for place, values in (varied_options or {}).items()},
        world=pretended.world,
        ranks_per_host=pretended.ranks_per_host,
        device_bytes=pretended.device_bytes,
        device_name=pretended.device_name,
        capability=pretended.capability,
        steps=steps,
        result=str(result),
        log=str(log),
        launched_at=orders.now(),
        patience_s=deadline_s,
        hidden=list(map(str, hidden_folders(program.model_dir, [folder]))),
    )
    request = LaunchRequest(
        interpreter=program.interpreter,
        entry=ENTRY,
        payload=asdict(order),
        cwd=str(program.model_dir),
        ranks=[RankRequest(environment=_environment(program, pretended), log=str(log), cores=[])],
        # The rank ends itself at the deadline, with the line that it has come to. The guard ends one that hangs.
        deadline_s=deadline_s + _GRACE_S,
        layer=layer_for(program, scratch, [folder]),
    )
    # The run, and what is left of it.
    try:
        ending = starter.launch(request).wait()
    except StarterClosedError:
        ending = ProcessesEnd("cancel", [None])
    if result.exists():
        run = ForeseenRun.from_json(json.loads(result.read_text()))
    else:
        run = ForeseenRun(world=pretended.world, stopped=_without_record(ending, log))
    put_away(scratch)
    if not run.stopped:
        shutil.rmtree(own, ignore_errors=True)
    switches = switches_of(overrides)
    return replace(run, ds_config={**run.ds_config, PROGRAM: switches}) if switches and run.ds_config else run


_WITHOUT_DEVICES = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    # A compiled program is foreseen as it is written, operator by operator.
    "TORCHDYNAMO_DISABLE": "1",
}


def _environment(program: Program, pretended: Pretended) -> dict[str, str]:
    # The variables that the user's launcher sets for rank 0, without the devices of this host.
    local, world = str(pretended.ranks_per_host), str(pretended.world)
    numbers = {"rank": "0", "local_rank": "0", "ranks": world, "local_ranks": local}
    launcher = launcher_named(program.launched_by)
    hosts = max(1, pretended.world // pretended.ranks_per_host)
    by_deepspeed = {"LOCAL_SIZE": local, "CROSS_RANK": "0", "CROSS_SIZE": str(hosts)}
    return {
        **program.environment,
        **_WITHOUT_DEVICES,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": local,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "RANK": "0",
        "LOCAL_RANK": "0",
        **(by_deepspeed if launcher.sets_local_size else {}),
        **{name: value.format(**numbers) for name, value in launcher.rank_variables.items()},
    }


def _without_record(ending: ProcessesEnd, log: Path) -> str:
    status = ending.statuses[0] if ending.statuses else None
    if ending.ended_by != "ranks" or status is None:
        return f"The foreseen run was ended from outside ({ending.ended_by}); its log is {log}."
    if status < 0:
        return f"The process of the foreseen run ended by {signal.Signals(-status).name}; its log is {log}."
    return f"The process of the foreseen run ended with status {status} and no record; its log is {log}."
