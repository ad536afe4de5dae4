"""The plan of a launch of the public grids: the product's formulas for layouts, with the words of a row.

How a framework divides a model into stages, and what its loss keeps, is read in its code: nanotron of the Ultra-Scale
Playbook (src/nanotron/models/base.py, parallel/pipeline_parallel/engine.py), and Aleph Alpha's scaling
(src/scaling/core/nn/parallel_module/pipeline_partitioning.py, transformer/model/losses).
"""

from collections.abc import Mapping
from typing import Any

from benchmarks.foresee.public_gpus.row_cluster import cluster_of
from zerotune.trial_lib.plan.layouts import DecoderShape, LaidOutDecoder

_BY_COST, _UNIFORM = "nanotron", "AA-Scaling"


class Launch:
    """One configuration of one model on some devices, with all that a `LaidOutDecoder` has."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        """`row` is as `benchmarks/replay/tables/grids.jsonl.gz` has it."""
        cluster = cluster_of(row)
        assert cluster is not None, "the grids have known devices"
        is_uniform = row["framework"].startswith(_UNIFORM)
        self.row = row
        self.decoder = LaidOutDecoder(
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
            is_checkpointed=bool(row["activation_checkpointing"]),
            division="cost" if row["framework"].startswith(_BY_COST) else "uniform" if is_uniform else "layers",
            divides_norms=bool(row.get("megatron_sequence_parallel")),
            gathers=is_uniform,
            kernel=str(row.get("kernel") or "flash + RMS"),
            gradient_bytes=4 if "fp32 grad" in str(row["precision"]) else 2,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)

    @property
    def samples_per_s(self) -> float:
        """The foreseen speed of all replicas."""
        return self.decoder.step.samples_per_s
