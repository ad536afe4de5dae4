"""The plan of a Megatron-like decoder: bytes of a device by formulas, and the step by the planner's own clocks.

A decoder with gated feed-forward layers is divided by tensor parallelism (with or without its sequence-parallel
regions), by a pipeline (one forward, one backward) and by data parallelism with ZeRO 0 or 1. Bytes that a layer keeps
are counted as Korthikanti et al. do (arXiv 2205.05198, section 4), tensor by tensor. Nothing here is fitted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from benchmarks.foresee.public_gpus.row_cluster import cluster_of
from zerotune.trial_lib.messages.foreseen_run import MOMENTS, OPERATIONS, ForeseenRun, Moment, Operation
from zerotune.trial_lib.plan.step_time import planned_step

_KIND = {name: index for index, name in enumerate(OPERATIONS)}
_HALF, _SINGLE = 0, 1
_DTYPES = ("bfloat16", "float32")
# Of a parameter: 32-bit copy and Adam's states; what an update reads and writes (16 of them and the gradient, 12 back).
_STATE_BYTES, _UPDATE_BYTES = 12, 28
# Where 32-bit sums are apart, PyTorch's data parallelism has each gradient of 16 bits and a copy in its buckets.
_BESIDE_SUMS = 4
# Of a token and a number of its width: a norm as one kernel, and as five operations of PyTorch in 32 bits. What the
# latter keep beside their input: two copies of 32 bits and one of 16.
_NORM_MOVED, _NORM_WRITTEN_OUT, _NORM_KEPT = 4, 28, 10
# Of a score: read and written by softmax as one kernel, and with scale and mask apart; kept by both.
_SCORES_MOVED, _SCORES_KEPT = {"fused": 4, "torch": 14}, {"fused": 4, "torch": 8}
# Of a logit: 16 bits, 32 bits, and its gradient of 32 bits as the backward pass begins.
_LOGIT_BYTES = 10


@dataclass(frozen=True)
class Launch:
    """One configuration of one model on some devices."""

    row: Mapping[str, Any]  # as `benchmarks/replay/tables/grids.jsonl.gz` has it

    @cached_property
    def tensor(self) -> int:
        return int(self.row["tensor_parallel"])

    @cached_property
    def stages(self) -> int:
        return int(self.row["pipeline_parallel"])

    @cached_property
    def replicas(self) -> int:
        return int(self.row["gpus"]) // (self.tensor * self.stages)

    @cached_property
    def accumulation(self) -> int:
        return int(self.row["grad_accum"])

    @property
    def is_possible(self) -> bool:
        """Whether each stage of the pipeline has a layer."""
        return bool(self.stages <= self.row["layers"])

    @property
    def _tokens(self) -> float:
        return float(self.row["micro_batch"] * self.row["seq_len"])

    @property
    def _shared(self) -> int:
        # Ranks that share what tensor parallelism alone leaves whole.
        return self.tensor if self.row.get("megatron_sequence_parallel") else 1

    @property
    def _kernel(self) -> str:
        return str(self.row.get("kernel") or "flash + RMS")

    @property
    def _attention(self) -> str:
        return self._kernel if self._kernel in _SCORES_KEPT else "flash"

    @property
    def _scores(self) -> float:
        # Of all heads of a layer on one rank, in numbers.
        return float(self.row["heads"] / self.tensor * self._tokens * self.row["seq_len"])

    @cached_property
    def _layer_parameters(self) -> list[float]:
        hidden, ffn = self.row["hidden"], self.row["ffn"]
        of_keys = hidden * (self.row.get("kv_heads") or self.row["heads"]) / self.row["heads"]
        return [hidden * (hidden + 2 * of_keys), hidden * hidden, hidden * 2 * ffn, hidden * ffn]

    @cached_property
    def _head_parameters(self) -> float:
        return float(self.row["vocab"] * self.row["hidden"])

    @cached_property
    def _heads(self) -> int:
        # Matrices of the vocabulary: one if the output layer is the embedding.
        outside = self.row["params"] - self.row["layers"] * sum(self._layer_parameters)
        return 1 if outside < 1.5 * self._head_parameters else 2

    @cached_property
    def _last_stage(self) -> int:
        # Layers of the last stage if all stages have the same work, the output layer among it.
        head = self._head_parameters / sum(self._layer_parameters)
        return max(0, round((self.row["layers"] + head) / self.stages - head))

    @property
    def _gradient_bytes(self) -> int:
        return 4 if "fp32 grad" in str(self.row["precision"]) else 2

    # -- bytes ---------------------------------------------------------------------------------------------------

    @cached_property
    def states(self) -> float:
        """Bytes of parameters, gradients and optimizer states on the device that has most of them."""
        outside = self._heads * self._head_parameters if self.stages == 1 else self._head_parameters
        layers = self.row["layers"] if self.stages == 1 else -(-self.row["layers"] // self.stages)
        parameters = (layers * sum(self._layer_parameters) + outside) / self.tensor
        beside = _BESIDE_SUMS if self._gradient_bytes == 4 and self.replicas > 1 else 0
        kept = _STATE_BYTES / (self.replicas if self.row["zero_stage"] else 1)
        return parameters * (2 + self._gradient_bytes + beside + kept)

    @cached_property
    def activations(self) -> float:
        """Bytes of activations on the stage that keeps most at a time: the first one, or the last with its logits."""
        first = -(-self.row["layers"] // self.stages)
        ahead = min(self.stages, self.accumulation)
        whole = self._kept_by_a_layer
        kept = 2 * self._tokens * self.row["hidden"] / self._shared if self.row["activation_checkpointing"] else whole
        again = whole if self.row["activation_checkpointing"] else 0.0
        logits = self._tokens * self.row["vocab"] / self.tensor * _LOGIT_BYTES
        last = self.row["layers"] if self.stages == 1 else self._last_stage
        return max(first * kept * ahead + again, last * kept + max(again, logits))

    @property
    def _kept_by_a_layer(self) -> float:
        width, ffn = self._tokens * self.row["hidden"], self._tokens * self.row["ffn"]
        of_keys = width * (self.row.get("kv_heads") or self.row["heads"]) / self.row["heads"]
        # Inputs of both norms, and what they give to the matrices.
        whole = 8 * width + (0 if "RMS" in self._kernel else 2 * _NORM_KEPT * width)
        # Queries, keys, values, and what attention gives; gate and branch, the activated gate, and their product.
        divided = 4 * width + 4 * of_keys + 8 * ffn
        if self._attention != "flash":
            divided += _SCORES_KEPT[self._attention] * self._scores * self.tensor
        return whole / self._shared + divided / self.tensor

    # -- seconds -------------------------------------------------------------------------------------------------

    @cached_property
    def samples_per_s(self) -> float:
        """The foreseen speed of all replicas."""
        cluster = cluster_of(self.row)
        assert cluster is not None, "the grids have known devices"
        return planned_step(self._run(), cluster).samples_per_s

    def _run(self) -> ForeseenRun:
        log = _Log()
        layers = self.row["layers"] if self.stages == 1 else self._last_stage
        shown = min(2, self.accumulation)
        for index in range(shown):
            log.begin("forward", index)
            self._send(log)
            for _ in range(layers):
                self._layer(log)
            self._head(log)
            log.begin("backward", index)
            self._head(log, backward=True)
            for _ in range(layers):
                if self.row["activation_checkpointing"]:
                    self._layer(log)
                self._layer(log, backward=True)
            self._send(log)
        parameters = (layers * sum(self._layer_parameters) + self._head_parameters) / self.tensor
        is_sharded = bool(self.row["zero_stage"]) and self.replicas > 1
        log.add(
            "reduce_scatter" if is_sharded else "all_reduce", 0, self._gradient_bytes * parameters, ranks=self.replicas
        )
        log.begin("update", shown - 1)
        own = parameters / self.replicas if is_sharded else parameters
        log.add("update", 10 * own, _UPDATE_BYTES * own, _SINGLE)
        if is_sharded:
            log.add("all_gather", 0, 2 * parameters, ranks=self.replicas)
        return ForeseenRun(
            world=self.row["gpus"],
            replicas=self.replicas,
            micro_batch=self.row["micro_batch"],
            accumulation=self.accumulation,
            tokens=self.row["seq_len"],
            stage=self.row["zero_stage"],
            pipeline_stages=self.stages,
            ds_config={"zero_optimization": {"stage": self.row["zero_stage"]}},
            dtypes=_DTYPES,
            moments=tuple(log.moments),
            operations=tuple(log.operations),
        )

    def _layer(self, log: "_Log", backward: bool = False) -> None:
        width, times = self._tokens * self.row["hidden"], 2 if backward else 1
        (qkv, out, up, down), ffn = self._layer_parameters, self._tokens * self.row["ffn"]
        for inward, outward in ((qkv, out), (up, down)):
            self._norm(log, width, times)
            self._product(log, inward, times)
            if inward is qkv:
                log.add("elementwise", 0, 8 * width / self.tensor * times)
                self._mix(log, width, backward)
            else:
                log.add("elementwise", 0, 10 * ffn / self.tensor * times)
            self._product(log, outward, times)
            log.add("all_reduce", 0, 2 * width, ranks=self.tensor)
            log.add("elementwise", 0, 6 * width / self._shared)

    def _norm(self, log: "_Log", width: float, times: int) -> None:
        if "RMS" in self._kernel:
            log.add("norm", 0, _NORM_MOVED * width / self._shared * times)
            return
        for _ in range(5 * times):
            log.add("norm", 0, _NORM_WRITTEN_OUT / 5 * width / self._shared)

    def _product(self, log: "_Log", parameters: float, times: int) -> None:
        weight = parameters / self.tensor
        inner = self.row["hidden"]
        moved = 2 * (self._tokens * inner + weight + self._tokens * weight / inner)
        for _ in range(times):
            log.add("matmul", 2 * self._tokens * weight, moved)

    def _mix(self, log: "_Log", width: float, backward: bool) -> None:
        flops, size = 4 * self._tokens * self.row["seq_len"] * self.row["hidden"] / self.tensor, width / self.tensor
        if self._attention == "flash":
            log.add("attention", flops * (2.5 if backward else 1), size * (16 if backward else 8))
            return
        for _ in range(4 if backward else 2):
            log.add("matmul", flops / 2, 2 * self._scores + 4 * size)
        log.add("elementwise", 0, _SCORES_MOVED[self._attention] * self._scores * (2 if backward else 1))

    def _head(self, log: "_Log", backward: bool = False) -> None:
        self._product(log, self._head_parameters, 2 if backward else 1)
        log.add("loss", 0, 10 * self._tokens * self.row["vocab"] / self.tensor, _SINGLE)

    def _send(self, log: "_Log") -> None:
        # Neighbouring stages lie side by side.
        if self.stages > 1:
            size = 2 * self._tokens * self.row["hidden"] / self._shared
            log.add("send", 0, size, ranks=2 * self.row["gpus"] // self.stages)


@dataclass
class _Log:
    """Moments and operations as they are written."""

    operations: list[Operation] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)

    def begin(self, name: str, micro_batch: int) -> None:
        self.moments.append(Moment(MOMENTS.index(name), 1, micro_batch, 0, len(self.operations)))

    def add(self, kind: str, flops: float, moved: float, dtype: int = _HALF, ranks: int = 1) -> None:
        self.operations.append(Operation(_KIND[kind], dtype, flops, moved, ranks))
