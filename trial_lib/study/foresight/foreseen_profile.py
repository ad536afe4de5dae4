"""A model's profile from a foreseen run, in the place of a profile trial."""

from trial_lib.device.host.base import Host
from trial_lib.device.host.free_host_memory import available_bytes
from trial_lib.device.host.this_host import kind_of
from trial_lib.foresee.memory.constants import outside_pytorch
from trial_lib.foresee.time.kernels import ON_MATRIX_UNITS
from trial_lib.memory.foreseen_bytes import ForeseenArm, nearest_arm
from trial_lib.records.result import ModelProfile
from trial_lib.study.setup import StudySetup
from trial_lib.wire.foreseen_run import MOMENTS, OPERATIONS, ForeseenRun

_MODEL_FLOPS = frozenset(map(OPERATIONS.index, ON_MATRIX_UNITS))
_PASSES = frozenset(MOMENTS.index(name) for name in ("forward", "backward"))


def foreseen_profile(typed: ForeseenRun, arms: tuple[ForeseenArm, ...], setup: StudySetup) -> ModelProfile:
    """Returns the profile of a model that was foreseen on the devices of a study.

    Args:
        typed: the run of the program as typed.
        arms: the arms that were foreseen, at least one.
        setup: the study's.
    """
    own = nearest_arm(arms, typed.ds_config)
    on_gpus = not kind_of(setup.device).computes_on_the_processor
    free = available_bytes() if on_gpus else None
    return ModelProfile(
        num_params=typed.parameters,
        trainable_num_params=typed.trainable,
        # Those of one micro-batch. In its runs the first stage of a pipeline holds as many as there are stages.
        activation_mem_per_gpu=int(own.backward.per_sample / typed.pipeline_stages),
        gpu_mem=_for_the_model(typed, setup.host, setup.memory_limit, on_gpus),
        host_mem=(free or 0) // max(1, len(setup.host.slots)),
        data_parallel_size=typed.replicas,
        pipeline_parallel=typed.is_pipeline,
        flops_per_sample=flops_per_sample(typed),
    )


def _for_the_model(typed: ForeseenRun, host: Host, limit: int | None, on_gpus: bool) -> int:
    """Returns the bytes that the model may use on a slot; 0 if that is not known."""
    if not on_gpus:
        # The budget holds for the whole process, which has its libraries before it has an engine.
        return max(0, (limit or 0) - typed.process_bytes) if typed.process_bytes else 0
    if not host.memory_per_slot:
        return 0
    ranks_here = min(typed.world, len(host.slots))
    return max(0, int(host.memory_per_slot - outside_pytorch(typed.world, ranks_here).mean))


def flops_per_sample(run: ForeseenRun) -> float:
    """Returns the model FLOPs of a run's last forward and backward passes for one sample, on all devices of a replica.

    The same operations count as in a profile trial (`trial_lib/flops`).
    """
    last = max((moment.step for moment in run.moments if moment.name in _PASSES), default=0)
    passes = [
        sum(each.flops for each in operations if each.kind in _MODEL_FLOPS)
        for moment, operations in run.operations_by_moment()
        if moment.step == last and moment.name in _PASSES
    ]
    samples = run.micro_batch * run.accumulation
    return sum(passes) / samples * run.world / run.replicas if samples and run.replicas else 0.0
