"""The foreseen runs of one arm, and what follows from them for other devices and micro-batches. Pure."""

from dataclasses import dataclass, replace

from trial_lib.foresee.memory.scaled_run import have_same_events, scaled_run
from trial_lib.foresee.plan.arms import PlanArm
from trial_lib.foresee.time.by_size import at_size
from trial_lib.foresee.time.by_world import at_world
from trial_lib.wire.foreseen_run import KINDS, MOMENTS, ForeseenRun, Storage

_UPDATE = MOMENTS.index("update")
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
        run = self.small
        if micro_batch != run.micro_batch and self.large is not None and not self.is_of_one_size:
            run = at_size(run, self.large, micro_batch)
        if run.replicas != replicas:
            run = at_world(run, replicas) if run.replicas > 1 else _alone(run, replicas)
        return replace(run, accumulation=accumulation)

    @property
    def _wider(self) -> ForeseenRun | None:
        """The run on another number of ranks, if it differs in sizes alone."""
        wider = self.wider
        if wider is None or wider.stopped or wider.world == self.small.world:
            return None
        return wider if have_same_events(self.small, wider) else None


def divided_anew(run: ForeseenRun, replicas: int) -> ForeseenRun:
    """Returns a run whose partitioned states are divided over another number of replicas, by formula.

    States that are there when the optimizer steps count as partitioned from the stage on that partitions their kind.
    Buffers, and what a pass gathers for a while, stay.
    """
    updates = {moment.event for moment in run.moments if moment.name == _UPDATE}
    live: set[int] = set()
    states: set[int] = set()
    for index, (storage, is_made) in enumerate(run.events):
        if index in updates:
            states |= live
        if is_made:
            live.add(storage)
        else:
            live.discard(storage)
    states = states if updates else live
    partitioned = {KINDS.index(kind) for kind, stage in _PARTITIONED_FROM.items() if run.stage >= stage}
    share = run.replicas / replicas
    storages = tuple(
        _divided(storage, share) if storage.kind in partitioned and index in states else storage
        for index, storage in enumerate(run.storages)
    )
    return replace(run, storages=storages, replicas=replicas, world=run.world // run.replicas * replicas)


def _divided(storage: Storage, share: float) -> Storage:
    return storage._replace(size=round(storage.size * share))


def _alone(run: ForeseenRun, replicas: int) -> ForeseenRun:
    """Returns a run of one replica as one of several that send each other nothing: the best that it can show."""
    return replace(run, replicas=replicas, world=run.world * replicas)
