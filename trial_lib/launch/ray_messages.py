"""The messages to the hosts of a Ray cluster and back. They are plain data, and no file has them."""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from trial_lib.launch.rank_starter import ProcessesEnd
from trial_lib.launch.trial import TrialPlan
from trial_lib.messages.orders import TrainingSpec
from trial_lib.records.candidate import Sweep, Withdrawal
from trial_lib.records.folders import TrialPaths
from trial_lib.records.result import TrialResult

# Transfers a trial to another host and back: its plan there, its small files here.

# Only the end of a longer file is transferred. It is mostly a log.
_LARGEST_FILE = 8 * 2**20

FileContents = dict[str, bytes]
"""The contents of files, by their paths in the trial's folder."""

_ValueT = TypeVar("_ValueT")


def moved(plan: TrialPlan, root: Path) -> TrialPlan:
    """Returns a plan with its files in another folder. Its program's arguments and variables change too."""
    old, new = str(plan.paths.root), str(root)
    program = replace(
        plan.program,
        arguments=_renamed(plan.program.arguments, old, new),
        environment=_renamed(plan.program.environment, old, new),
        files={path.replace(old, new): text for path, text in plan.program.files.items()},
    )
    spec = plan.training_spec
    return replace(
        plan,
        paths=TrialPaths(root),
        program=program,
        training_spec=None if spec is None else TrainingSpec(**_renamed(asdict(spec), old, new)),
    )


def result_from(result: TrialResult, there: Path, here: Path) -> TrialResult:
    told = _renamed(result.model_dump(mode="json"), str(there), str(here))
    return TrialResult.model_validate_json(json.dumps(told))


def _renamed(value: _ValueT, old: str, new: str) -> _ValueT:
    if isinstance(value, str):
        return value.replace(old, new)  # type: ignore[return-value]
    if isinstance(value, dict):
        return {key: _renamed(inner, old, new) for key, inner in value.items()}  # type: ignore[return-value]
    if isinstance(value, list):
        return [_renamed(inner, old, new) for inner in value]  # type: ignore[return-value]
    return value


def packed(paths: TrialPaths) -> FileContents:
    """Returns the files that the ranks of a trial have left in its folder."""
    of_the_driver = (paths.candidate, paths.ds_config, paths.training_spec, paths.result)
    files: FileContents = {}
    for path in sorted(paths.root.rglob("*")):
        if path.is_file() and not path.is_symlink() and path not in of_the_driver:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _LARGEST_FILE))
                files[str(path.relative_to(paths.root))] = file.read()
    return files


def unpack(files: FileContents, root: Path) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


NAMESPACE = "zerotune"


@dataclass(frozen=True)
class ClusterShare:
    resource: str  # Ray's name of a slot: `GPU` or `CPU`
    slots: int  # the number of slots on each host
    hosts: int  # the number of hosts


@dataclass(frozen=True)
class ClusterOrder:
    study_id: str  # the study's id
    plans: tuple[TrialPlan, ...]  # the plans of its trials
    share: ClusterShare  # the part of the cluster that it takes
    sweep: Sweep | None = None  # the search's order. None for a single trial.

    @property
    def name(self) -> str:
        """The order's name, unique among all studies."""
        return self.plans[0].trial_id


@dataclass(frozen=True)
class Delivery:
    # For an order on one host: the result of each plan, with the driver's paths, or the reason for none
    ends: list[TrialResult | Withdrawal] = field(default_factory=list)
    ending: ProcessesEnd | None = None  # for an order on several hosts: the end of the ranks on all of them
    # For an order on several hosts: whether the out-of-memory killer struck on one of them
    kernel_killed: bool | None = False
    files: list[FileContents] = field(default_factory=list)  # the files that the ranks of each plan have left
    notes: list[str] = field(default_factory=list)  # sentences for the user on anything that delayed the order


def actor_name(study_id: str, node_id: str) -> str:
    return f"zerotune-{study_id}-{node_id}"
