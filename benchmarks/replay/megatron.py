"""The plan of a launch of the public grids: the product's formulas for layouts, with the words of a row.

How a framework divides a model into stages, and what its loss keeps, is read in its code: nanotron of the Ultra-Scale
Playbook (src/nanotron/models/base.py, parallel/pipeline_parallel/engine.py), and Aleph Alpha's scaling
(src/scaling/core/nn/parallel_module/pipeline_partitioning.py, transformer/model/losses).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

from benchmarks.foresee.public_gpus.row_cluster import cluster_of
from zerotune.trial_lib.plan.decoder import EMBEDDING, HEAD, LAYER, LOSS, DecoderShape
from zerotune.trial_lib.plan.laid_out import LaidOutDecoder, Writing, divided

_PLAYBOOK, _SCALING = "nanotron", "AA-Scaling"
_DIVISIONS: Mapping[str, Literal["uniform", "cost"]] = {_PLAYBOOK: "cost", _SCALING: "uniform"}
# The playbook's hosts need 4.5 ms for a layer with a micro-batch of one sample, however it is divided. Of 26, 60, 85
# and 100 operations this number fits best the worlds of up to 32 devices that `layouts.py` beside it does not hold out.
_PLAYBOOKS = Writing(forward=85, backward=170, norm_moved=4, norm_kept=0, torch="2.2")
# Bytes of a score, by the row's kernel: what a softmax reads and writes as one kernel or with scale and mask apart, and
# what both keep. A kernel that is not here keeps none.
_SCORES = {"fused": (4, 4), "torch": (14, 8)}


@dataclass(frozen=True, kw_only=True)
class LaunchedDecoder(LaidOutDecoder):
    """A decoder whose stages have as many layers each, or as many parts (`uniform`), or share the cost of the parts."""

    division: Literal["layers", "uniform", "cost"] = "layers"

    @property
    def is_possible(self) -> bool:
        """Whether each stage of the pipeline has a part of the model, and micro-batches for all but one of them."""
        starved = self.division == "cost" and self.accumulation < self.stages - 1
        return not starved and all(self.by_stage)

    @cached_property
    def by_stage(self) -> list[Sequence[str]]:
        if self.division == "layers":
            return super().by_stage
        parts = [EMBEDDING, *self.shape.layer_parts, "norm", HEAD]
        if self.division == "uniform":
            *first, last = divided(parts, self.stages)
            return [*first, [*last, LOSS]]
        costs = {HEAD: self.shape.of_head_matrix, LAYER: self.shape.shared_parameters(LAYER)}
        return _divided_by_cost([*parts, "cast", LOSS], costs, self.stages)


class Launch:
    """One configuration of one model on some devices, with all that a `LaunchedDecoder` has."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        """`row` is as `benchmarks/replay/tables/grids.jsonl.gz` has it."""
        cluster = cluster_of(row)
        assert cluster is not None, "the grids have known devices"
        self.row = row
        self.decoder = LaunchedDecoder(
            shape=DecoderShape(
                parameters=row["params"],
                layers=row["layers"],
                hidden=row["hidden"],
                heads=row["heads"],
                kv_heads=row.get("kv_heads") or row["heads"],
                ffn=row["ffn"],
                vocabulary=row["vocab"],
                tokens=row["seq_len"],
            ),
            cluster=cluster,
            tensor=int(row["tensor_parallel"]),
            stages=int(row["pipeline_parallel"]),
            zero_stage=row["zero_stage"],
            micro_batch=row["micro_batch"],
            accumulation=int(row["grad_accum"]),
            recomputed=row["layers"] if row["activation_checkpointing"] else 0,
            division=next((its for name, its in _DIVISIONS.items() if row["framework"].startswith(name)), "layers"),
            divides_norms=bool(row.get("megatron_sequence_parallel")),
            gathers=row["framework"].startswith(_SCALING),
            gradient_bytes=4 if "fp32 grad" in str(row["precision"]) else 2,
            writing=_writing(row),
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)

    @property
    def samples_per_s(self) -> float:
        """The foreseen speed of all replicas."""
        return self.decoder.step.samples_per_s


def _writing(row: Mapping[str, Any]) -> Writing:
    if row["framework"].startswith(_PLAYBOOK):
        return _PLAYBOOKS
    kernel = str(row.get("kernel") or "RMS")
    moved, kept = _SCORES.get(kernel, (0, 0))
    one_kernel = {"norm_moved": 4, "norm_kept": 0} if "RMS" in kernel else {}
    # Versions of torch whose kernel is flash-attn 1, or 2.
    torch = "2.0" if kernel.startswith("flash_attentionv1") else "2.2"
    return Writing(scores_moved=moved, scores_kept=kept, torch=torch, **one_kernel)


def _divided_by_cost(parts: Sequence[str], costs: Mapping[str, float], stages: int) -> list[Sequence[str]]:
    # A stage ends with the part that goes beyond its share of the cost.
    found: list[list[str]] = [[]]
    done = list(accumulate(costs.get(part, 0.0) for part in parts))
    for part, cost in zip(parts, done, strict=True):
        found[-1].append(part)
        if cost > done[-1] * len(found) / stages:
            found.append([])
    return [*found, *[[] for _ in range(stages - len(found))]]
