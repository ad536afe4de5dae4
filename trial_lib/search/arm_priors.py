"""What arms, and fine switches, are expected to cost before any is measured. The search looks at the cheapest first."""

from collections.abc import Sequence
from math import log
from typing import Any

from trial_lib.command.switches import path_of, switches_of
from trial_lib.deepspeed_config.layout import AUTOTP
from trial_lib.space.knobs import Arm, get_knob
from trial_lib.wire.turned import FUSED, WORKERS, compiles

# Shares of a step without offload. Stages 0 to 2 send 2 values a parameter, stage 3 sends 3 (Rajbhandari et al., ZeRO,
# arXiv 1910.02054, section 7): half as much again, of a share of about a tenth. Stage 3 also gathers and releases each
# module's parameters as it runs: at its best guess it is 13 to 29 % below the best of the other stages' on the recorded
# tables (benchmarks/replay). Offload sends states or parameters over the bus in each step, and updates on the host (Ren
# et al., ZeRO-Offload, arXiv 2101.06840, section 5). Recomputed activations cost another forward pass, a third of the
# work (Chen et al., arXiv 1604.06174).
_STAGE = {0: 0.0, 1: 0.01, 2: 0.02, 3: 0.15}
_OFFLOAD = {"offload_optimizer": 0.25, "offload_param": 0.25}
_RECOMPUTED = 1 / 3
# The same forward pass, of all blocks or of half. A fused attention kernel saves the reading and writing of the scores
# (Dao et al., FlashAttention, arXiv 2205.14135: 15 % of BERT's training, and more with the length). The options are
# those of a Hugging Face Trainer.
_SWITCHED = {
    ("model:activation_checkpointing", "full"): _RECOMPUTED,
    ("model:activation_checkpointing", "every_second"): _RECOMPUTED / 2,
    ("--gradient_checkpointing", True): _RECOMPUTED,
    ("model:attention", "eager"): 0.15,
    ("--attn_implementation", "eager"): 0.15,
}
# Llama 3.1 8B on 8 H100: 6,667 tokens/s compiled, 5,762 without (torchtitan, docs/performance.md, December 2024). Half
# of it is expected here, because graph breaks and short steps lose some.
_COMPILED = log(5762 / 6667) / 2
# Tokens/s on a GPU at tensor-parallel groups of 2, 4, 8, 16 and 32: 14,167, 13,460, 10,889, 6,159 and 3,610 (Hugging
# Face, The Ultra-Scale Playbook, 2025). No figure is given without groups, so the first doubling counts as the second.
_TENSOR_PARALLEL = {1: 0.0, 2: 0.05, 4: 0.1, 8: 0.35, 16: 1.35, 32: 2.95}

# Fine switches whose effect has one direction: the expected cost of the value at the wrong end. The workers vary
# only if the program waits at least 3 % of a step for its data (trial_lib/measure/loading_survey.py), and some programs
# wait far longer. On a GPU one kernel that updates all parameters saves launches and passes over them: PyTorch's
# documentation of Adam expects `fused` to be the fastest form there. It says nothing of a CPU: the best candidate of
# small_llama (benchmarks/replay) has no fused form. Both figures are assumptions.
_NO_WORKERS, _NOT_FUSED = 0.05, 0.02
ONE_WAY = {"cuda": frozenset([path_of(WORKERS), path_of(FUSED)]), "cpu": frozenset([path_of(WORKERS)])}
"""The paths of these switches, by device."""


def fine_cost(path: str, value: Any, values: Sequence[Any], device: str) -> float:
    """Returns the expected cost of a fine knob's value beside its best one, as a logarithm; 0 if none is expected.

    Args:
        path: of the knob.
        value: one of its values.
        values: all of them.
        device: `cuda` or `cpu`.
    """
    if path == path_of(WORKERS):
        numbers = [each for each in values if isinstance(each, int)]  # None leaves the program's own
        return _NO_WORKERS * (1 - value / max(1, *numbers)) if len(numbers) > 1 and value is not None else 0.0
    is_known = path == path_of(FUSED) and path in ONE_WAY[device]
    return _NOT_FUSED if is_known and value is False and True in values else 0.0


def prior_costs(arms: Sequence[Arm]) -> list[float]:
    """Returns the expected cost of each arm of a space beside stage 0 as it is, as a logarithm.

    The user's arm gets no advantage. Every study measures it anyway, so another arm teaches more.
    """
    return [_prior_cost(arm) for arm in arms]


def _prior_cost(arm: Arm) -> float:
    share = _STAGE[arm.stage]
    for section, cost in _OFFLOAD.items():
        if get_knob(arm.knobs, f"zero_optimization.{section}.device") not in (None, "none"):
            share += cost
    if any(get_knob(arm.knobs, f"activation_checkpointing.{key}") for key in ("enabled", "partition_activations")):
        share += _RECOMPUTED
    switches = switches_of(arm.knobs)
    share += sum(_SWITCHED.get(each, 0.0) for each in switches.items())
    group = get_knob(arm.knobs, AUTOTP) or 1
    share += max(cost for size, cost in _TENSOR_PARALLEL.items() if size <= group)
    return log(1 + share) + (_COMPILED if compiles(switches) else 0.0)
