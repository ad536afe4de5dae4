"""The plan that a study is asked to begin with, checked before anything is started."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from trial_lib.device.host.base import Host
from trial_lib.foresee.plan.arms import check_groups
from trial_lib.foresee.plan.kept_runs import kept_runs
from trial_lib.foresee.plan.plan_record import PlanPaths, PlanRecord
from trial_lib.memory.zero_settings import ZeroSettings
from trial_lib.study.foresight.plan_file import read_plan_file
from trial_lib.study.foresight.study_plan import plan_for, unlike_precision
from trial_lib.wire.errors import InputError

_SECTIONS = ("fp16", "bf16", "bfloat16")


def read_given_plan(
    given: Path, host: Host, slots: int, ds_config: Mapping[str, Any], stages: Collection[int]
) -> tuple[PlanPaths, PlanRecord]:
    """Returns the files of a plan, and the plan with nothing but the devices that are nearest to some slots.

    It is checked against all that a study knows before its profile trial.

    Args:
        given: its plan.json, or its folder.
        host: has the slots.
        slots: devices of a trial.
        ds_config: the user's DeepSpeed configuration as they wrote it; empty if it is in the code.
        stages: ZeRO stages that the study may use.

    Raises:
        InputError: there is no plan, it or one of its runs is damaged, it has foreseen nothing, it is of another
            precision, its groups of ranks do not go on so many slots, or it has none of the stages.
    """
    paths, record = read_plan_file(given)
    record, where = plan_for(record, host, slots), f"--plan {given}"
    (devices,) = record.devices
    # A damaged run would end the study when it has its folder.
    kept_runs(devices, paths)
    check_groups(record.ds_config, slots, where)
    unlike = unlike_precision(record.ds_config, ds_config) if _states_precision(ds_config) else ""
    if unlike:
        raise InputError(
            f"the plan {unlike}.", where=where, remedy="Make a plan of this configuration, or leave --plan out."
        )
    configs = [arm.ds_config for arm in devices.arms if not arm.stopped and arm.ds_config]
    planned = {ZeroSettings.of(config).stage for config in configs}
    if planned and not planned & set(stages):
        raise InputError(
            f"the plan has ZeRO {_listed(planned)}, and the study may use {_listed(stages)}.",
            where=where,
            remedy=f"Ask for stages of the plan (--zero-stages {min(planned)}), or leave --plan out.",
        )
    return paths, record


def _states_precision(ds_config: Mapping[str, Any]) -> bool:
    """Returns whether a configuration alone decides on 16 bits. Code may set what it lacks, or has as "auto"."""
    stated = [ds_config[name].get("enabled") for name in _SECTIONS if isinstance(ds_config.get(name), Mapping)]
    return bool(stated) and all(type(enabled) is bool for enabled in stated)


def _listed(stages: Collection[int]) -> str:
    return " and ".join(str(stage) for stage in sorted(stages))
