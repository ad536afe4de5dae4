"""The foreseen runs of one arm, and what follows from them for other devices and micro-batches. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median

from trial_lib.command.switches import switch_key
from trial_lib.foresee.memory.scaled_run import have_same_events, scaled_run
from trial_lib.foresee.plan.arms import PlanArm
from trial_lib.foresee.time.by_size import at_size
from trial_lib.foresee.time.by_world import at_world
from trial_lib.wire.foreseen_run import KINDS, MOMENTS, PLACES, ForeseenRun, Storage

_UPDATE, _DEVICE = MOMENTS.index("update"), PLACES.index("device")
# The first ZeRO stage that partitions a kind of state (Rajbhandari et al., ZeRO, arXiv 1910.02054).
_PARTITIONED_FROM = {"optimizer": 1, "gradient": 2, "parameter": 3}


@dataclass(frozen=True)
class ArmRuns:
    """The foreseen runs of one arm.

    Attributes:
        arm: what ran.
        small: the run at a small micro-batch.
        large: the same at a larger one; None if the program takes only one size.
        wider: the run at the small micro-batch on another number of ranks; None if there is none.
        names: of the runs' files.
    """

    arm: PlanArm
    small: ForeseenRun
    large: ForeseenRun | None = None
    wider: ForeseenRun | None = None
    names: tuple[str, ...] = ()
    _at_sizes: dict[int, ForeseenRun] = field(default_factory=dict, repr=False, compare=False)

    @property
    def runs(self) -> list[ForeseenRun]:
        """All of them."""
        return [run for run in (self.small, self.large, self.wider) if run is not None]

    def with_loading(self, of_a_sample: float | None, is_beside: bool) -> "ArmRuns":
        """Returns the arm with another loading time.

        Args:
            of_a_sample: seconds; None if it is not known.
            is_beside: whether worker processes load while the rank trains.
        """

        def changed(run: ForeseenRun) -> ForeseenRun:
            loading = () if of_a_sample is None else (of_a_sample * run.micro_batch,)
            return replace(run, loading_s=loading, loads_beside=is_beside)

        return replace(
            self,
            small=changed(self.small),
            large=None if self.large is None else changed(self.large),
            wider=None if self.wider is None else changed(self.wider),
            _at_sizes={},
        )

    @property
    def stopped(self) -> str:
        """Why the arm cannot be foreseen; empty if it was."""
        return self.small.stopped

    @property
    def is_of_one_size(self) -> bool:
        """Whether nothing is known about other micro-batches."""
        return self.large is None or bool(self.large.stopped)

    def is_scaled(self, replicas: int) -> bool:
        """Returns whether no run was of so many replicas, so that the states are divided anew."""
        return replicas != self.small.replicas

    def at_replicas(self, replicas: int) -> tuple[ForeseenRun, ForeseenRun | None]:
        """Returns the runs at the small and at the larger micro-batch on a number of replicas of the model."""
        large = None if self.is_of_one_size else self.large
        if replicas == self.small.replicas:
            return self.small, large
        wider = self._wider
        world = self.small.world // self.small.replicas * replicas
        if wider is None:
            return divided_anew(self.small, replicas), None if large is None else divided_anew(large, replicas)
        one = scaled_run(self.small, wider=wider, world=world)
        if large is None:
            return one, None
        if not have_same_events(self.small, large):
            return one, divided_anew(large, replicas)
        other = scaled_run(self.small, larger=large, wider=wider, micro_batch=large.micro_batch, world=world)
        return one, other

    def step_at(self, replicas: int, micro_batch: int, accumulation: int) -> ForeseenRun:
        """Returns the run whose operations are those of a micro-batch on a number of replicas.

        Args:
            replicas: of the model.
            micro_batch: samples.
            accumulation: micro-batches of an optimizer step.
        """
        run = self._at_size(micro_batch)
        if run.replicas != replicas:
            run = at_world(run, replicas) if run.replicas > 1 else _alone(run, replicas)
        return replace(run, accumulation=accumulation)

    @cached_property
    def partitioned(self) -> tuple[float, float]:
        """Bytes of the small run's share of partitioned states, on the device and on the host."""
        return partitioned_bytes(self.small)

    def _at_size(self, micro_batch: int) -> ForeseenRun:
        if micro_batch == self.small.micro_batch or self.large is None or self.is_of_one_size:
            return self.small
        if micro_batch not in self._at_sizes:
            self._at_sizes[micro_batch] = at_size(self.small, self.large, micro_batch)
        return self._at_sizes[micro_batch]

    @property
    def _wider(self) -> ForeseenRun | None:
        """The run on another number of ranks, if it differs in sizes alone."""
        wider = self.wider
        if wider is None or wider.stopped or wider.world == self.small.world:
            return None
        return wider if have_same_events(self.small, wider) else None


def divided_anew(run: ForeseenRun, replicas: int) -> ForeseenRun:
    """Returns a run whose partitioned states are divided over another number of replicas, by formula.

    Buffers, and what a pass gathers for a while, stay.
    """
    partitioned, share = partitioned_states(run), run.replicas / replicas
    storages = tuple(
        _divided(storage, share) if index in partitioned else storage for index, storage in enumerate(run.storages)
    )
    return replace(run, storages=storages, replicas=replicas, world=run.world // run.replicas * replicas)


def partitioned_states(run: ForeseenRun) -> set[int]:
    """Returns the indexes of the storages with this rank's share of states that ZeRO partitions.

    States that are there when the optimizer steps count as partitioned from the stage on that partitions their kind.
    """
    kinds = {KINDS.index(kind) for kind, stage in _PARTITIONED_FROM.items() if run.stage >= stage}
    return {index for index in persistent(run) if run.storages[index].kind in kinds}


def persistent(run: ForeseenRun) -> set[int]:
    """Returns the indexes of the storages that are there when an optimizer steps; at the end of a run without steps."""
    updates = {moment.event for moment in run.moments if moment.name == _UPDATE}
    live: set[int] = set()
    found: set[int] = set()
    for index, event in enumerate(run.events):
        if index in updates:
            found |= live
        if event.is_made:
            live.add(event.storage)
        else:
            live.discard(event.storage)
    return found if updates else live


def partitioned_bytes(run: ForeseenRun) -> tuple[float, float]:
    """Returns the bytes of one rank's share of partitioned states, on the device and on the host.

    A share that is made anew in each step counts once.
    """
    device = host = 0.0
    most: dict[tuple[int, int], float] = {}
    live: dict[tuple[int, int], float] = {}
    states = partitioned_states(run)
    for event in run.events:
        if event.storage not in states:
            continue
        storage = run.storages[event.storage]
        key = storage.kind, storage.place
        live[key] = live.get(key, 0.0) + (storage.size if event.is_made else -storage.size)
        most[key] = max(most.get(key, 0.0), live[key])
    for (_, place), size in most.items():
        if place == _DEVICE:
            device += size
        else:
            host += size
    return device, host


def _divided(storage: Storage, share: float) -> Storage:
    return storage._replace(size=round(storage.size * share))


def _alone(run: ForeseenRun, replicas: int) -> ForeseenRun:
    """Returns a run of one replica as one of several that send each other nothing: the best that it can show."""
    return replace(run, replicas=replicas, world=run.world * replicas)


def with_common_loading(arms: Sequence[ArmRuns]) -> list[ArmRuns]:
    """Returns the arms with the same loading time of a sample, which is the median over the runs of all of them.

    Loading is measured, and a run has only a few batches. An arm would otherwise look slow because another process
    disturbed its run. Arms with other switches of the program may load otherwise, so they have a median of their own.

    Args:
        arms: of one program.
    """
    alike: dict[tuple[tuple[str, str], ...], list[ForeseenRun]] = {}
    for arm in arms:
        alike.setdefault(switch_key(arm.arm.knobs), []).extend(arm.runs)
    return [arm.with_loading(*_of_a_sample(alike[switch_key(arm.arm.knobs)])) for arm in arms]


def _of_a_sample(runs: Sequence[ForeseenRun]) -> tuple[float | None, bool]:
    """Returns the median loading time of a sample, and whether workers load. A few runs may not have shown that."""
    beside = [run for run in runs if run.loads_beside]
    seconds = [each / run.micro_batch for run in beside or runs for each in run.loading_s if run.micro_batch]
    return (median(seconds) if seconds else None), bool(beside)
