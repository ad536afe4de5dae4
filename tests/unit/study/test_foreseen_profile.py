"""The profile of a model from a foreseen run."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from tests.unit.plan.pretended_runs import MIB, pretended_run
from zerotune.trial_lib.report.estimate_report import simulated_profile
from zerotune.trial_lib.search.allocations import ForeseenArm, SizeLine

CONFIG = {"zero_optimization": {"stage": 1}}


def _profile(stages: int) -> Any:
    """The profile of a model on 8 ranks, whose stages hold 64 MiB of activations for each sample and micro-batch."""
    held = SizeLine(2.0 * MIB, 64.0 * MIB * stages)
    arm = ForeseenArm(ds_config=CONFIG, initialize=SizeLine(1.0), backward=held, update=SizeLine(0.0))
    made = pretended_run(CONFIG, 8, 1, stages + 1 if stages > 1 else 2)
    typed = replace(made, replicas=8 // stages, is_pipeline=stages > 1, pipeline_stages=stages, process_bytes=0)
    setup: Any = SimpleNamespace(device="cpu", host=SimpleNamespace(slots=range(8)), memory_limit=None)
    return simulated_profile(typed, (arm,), setup)


def test_activations_are_those_of_one_micro_batch() -> None:
    """The first stage of a pipeline holds those of as many micro-batches as there are stages."""
    assert _profile(1).activation_mem_per_gpu == 64 * MIB
    assert _profile(4).activation_mem_per_gpu == 64 * MIB


def test_the_profile_says_whether_the_ranks_form_a_pipeline() -> None:
    assert (_profile(1).pipeline_parallel, _profile(1).data_parallel_size) == (False, 8)
    assert (_profile(4).pipeline_parallel, _profile(4).data_parallel_size) == (True, 2)
