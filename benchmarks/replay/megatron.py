"""The plan of a Megatron-like decoder: bytes of a device by formulas, and the step by the planner's own clocks.

A decoder with gated feed-forward layers is divided by tensor parallelism (with or without its sequence-parallel
regions), by a pipeline (one forward, one backward) and by data parallelism with ZeRO 0 or 1. Bytes that a layer keeps
are counted as Korthikanti et al. do (arXiv 2205.05198, section 4), tensor by tensor. How a framework divides a model
into stages, and what its loss keeps, is read in its code. Nothing here is fitted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from benchmarks.foresee.public_gpus.row_cluster import cluster_of
from zerotune.trial_lib.messages.foreseen_run import MOMENTS, OPERATIONS, ForeseenRun, Moment, Operation
from zerotune.trial_lib.plan.devices import Cluster
from zerotune.trial_lib.plan.fits import CONTEXT, communication
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
# `torch.nn.functional.cross_entropy` has the logarithm of its softmax, that one's gradient and the logits' own besides
# the logits of 16 bits. Each rank has all of them, if they are gathered for it.
_WHOLE_LOGIT_BYTES = 14
# What a device has to have for activations, as a multiple of them: the median of 263 foreseen runs of other sources
# (`least`, `allocated` and the states at the peak in row_bytes.json and grid_bytes.json of benchmarks/foresee).
_PIECES = 1.16
# nanotron of the Ultra-Scale Playbook (src/nanotron/models/base.py, parallel/pipeline_parallel/engine.py), and Aleph
# Alpha's scaling (src/scaling/core/nn/parallel_module/pipeline_partitioning.py, transformer/model/losses).
_BY_COST, _UNIFORM = "nanotron", "AA-Scaling"
_LAYER, _HEAD, _LOSS = "layer", "head", "loss"


@dataclass(frozen=True)
class Launch:
    """One configuration of one model on some devices."""

    row: Mapping[str, Any]  # as `benchmarks/replay/tables/grids.jsonl.gz` has it

    @cached_property
    def cluster(self) -> Cluster:
        found = cluster_of(self.row)
        assert found is not None, "the grids have known devices"
        return found

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
        """Whether each stage of the pipeline has a part of the model. nanotron also wants micro-batches for all but one
        of them.
        """
        starved = self.row["framework"].startswith(_BY_COST) and self.accumulation < self.stages - 1
        return not starved and all(self._by_stage)

    @cached_property
    def _by_stage(self) -> list[Sequence[str]]:
        # The parts of the model on each stage.
        parts = ["embedding", *[_LAYER] * self.row["layers"], "norm", _HEAD]
        if self.row["framework"].startswith(_BY_COST):
            costs = {_LAYER: sum(self._layer_parameters), _HEAD: self._head_parameters}
            return _divided_by_cost([*parts, "cast", _LOSS], costs, self.stages)
        if not self.row["framework"].startswith(_UNIFORM):
            # As many layers on each.
            layers = _divided(parts[1:-2], self.stages)
            return (
                [[*parts[:1], *layers[0]], *layers[1:-1], [*layers[-1], _HEAD, _LOSS]]
                if self.stages > 1
                else [[*parts, _LOSS]]
            )
        *first, last = _divided(parts, self.stages)
        return [*first, [*last, _LOSS]]

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
    def _slowest(self) -> Sequence[str]:
        # The stage that computes most.
        of_layer = sum(self._layer_parameters) + 2 * self.row["seq_len"] * self.row["hidden"]
        costs = {_LAYER: of_layer, _HEAD: self._head_parameters}
        return max(self._by_stage, key=lambda parts: sum(costs.get(part, 0.0) for part in parts))

    @property
    def _gradient_bytes(self) -> int:
        return 4 if "fp32 grad" in str(self.row["precision"]) else 2

    # -- bytes ---------------------------------------------------------------------------------------------------

    @cached_property
    def states(self) -> float:
        """Bytes of parameters, gradients and optimizer states on the device that needs most."""
        return self._fullest[0]

    @cached_property
    def activations(self) -> float:
        """Bytes of activations there."""
        return self._fullest[1]

    @property
    def needed(self) -> float:
        """Bytes that PyTorch has to have there."""
        return self.states + _PIECES * self.activations

    @property
    def outside(self) -> float:
        """Bytes of the context, and of NCCL for each group that a rank belongs to."""
        groups = ((self.tensor, 1), (self.replicas, self.tensor), (self.stages, self.tensor * self.replicas))
        spans = [(ranks, ranks * apart) for ranks, apart in groups if ranks > 1]
        return CONTEXT.mean + sum(communication(max(ranks, span), self.cluster.per_host).mean for ranks, span in spans)

    @cached_property
    def _fullest(self) -> tuple[float, float]:
        return max(map(self._bytes_of_stage, range(self.stages)), key=sum)

    def _bytes_of_stage(self, stage: int) -> tuple[float, float]:
        # States and activations. One forward pass more than the stages behind are on their way.
        parts, ahead = self._by_stage[stage], min(self.stages - stage, self.accumulation)
        kept = again = self._kept_by_a_layer
        if self.row["activation_checkpointing"]:
            kept = 2 * self._tokens * self.row["hidden"] / self._shared
        else:
            again = 0.0
        if _LOSS in parts:
            again = max(again, self._tokens * self.row["vocab"] * self._logit_bytes)
        return self._states_of(parts), parts.count(_LAYER) * kept * ahead + again

    def _states_of(self, parts: Sequence[str]) -> float:
        outside = min(self._heads, parts.count("embedding") + parts.count(_HEAD))
        parameters = parts.count(_LAYER) * sum(self._layer_parameters) + outside * self._head_parameters
        beside = _BESIDE_SUMS if self._gradient_bytes == 4 and self.replicas > 1 else 0
        kept = _STATE_BYTES / (self.replicas if self.row["zero_stage"] else 1)
        return parameters / self.tensor * (2 + self._gradient_bytes + beside + kept)

    @property
    def _gathers_logits(self) -> bool:
        return bool(self.row["framework"].startswith(_UNIFORM))

    @property
    def _logit_bytes(self) -> float:
        return _WHOLE_LOGIT_BYTES if self._gathers_logits else _LOGIT_BYTES / self.tensor

    @property
    def _kept_by_a_layer(self) -> float:
        width, ffn = self._tokens * self.row["hidden"], self._tokens * self.row["ffn"]
        of_keys = width * (self.row.get("kv_heads") or self.row["heads"]) / self.row["heads"]
        # Inputs of both norms, and what they give to the matrices. That is gathered, and may be kept so.
        of_matrices = 4 * width * (self._shared if self.row["framework"].startswith(_UNIFORM) else 1)
        whole = 4 * width + of_matrices + (0 if "RMS" in self._kernel else 2 * _NORM_KEPT * width)
        # Queries, keys, values, and what attention gives; gate and branch, the activated gate, and their product.
        divided = 4 * width + 4 * of_keys + 8 * ffn
        if self._attention != "flash":
            divided += _SCORES_KEPT[self._attention] * self._scores * self.tensor
        return whole / self._shared + divided / self.tensor

    # -- seconds -------------------------------------------------------------------------------------------------

    @cached_property
    def samples_per_s(self) -> float:
        """The foreseen speed of all replicas."""
        return planned_step(self._run(), self.cluster).samples_per_s

    def _run(self) -> ForeseenRun:
        log = _Log()
        layers, heads = self._slowest.count(_LAYER), self._slowest.count(_HEAD)
        shown = min(2, self.accumulation)
        for index in range(shown):
            log.begin("forward", index)
            self._send(log)
            for _ in range(layers):
                self._layer(log)
            for _ in range(heads):
                self._head(log)
            log.begin("backward", index)
            for _ in range(heads):
                self._head(log, backward=True)
            for _ in range(layers):
                if self.row["activation_checkpointing"]:
                    self._layer(log)
                self._layer(log, backward=True)
            self._send(log)
        parameters = (layers * sum(self._layer_parameters) + max(1, heads) * self._head_parameters) / self.tensor
        is_sharded = bool(self.row["zero_stage"]) and self.replicas > 1
        reduces = "reduce_scatter" if is_sharded else "all_reduce"
        log.add(reduces, 0, self._gradient_bytes * parameters, ranks=self.replicas, apart=self.tensor)
        log.begin("update", shown - 1)
        own = parameters / self.replicas if is_sharded else parameters
        log.add("update", 10 * own, _UPDATE_BYTES * own, _SINGLE)
        if is_sharded:
            log.add("all_gather", 0, 2 * parameters, ranks=self.replicas, apart=self.tensor)
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
            log.add("all_reduce", 0, 2 * width, ranks=self.tensor, apart=1)
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
        logits = self._tokens * self.row["vocab"]
        if self._gathers_logits and not backward:
            log.add("all_gather", 0, 2 * logits, ranks=self.tensor, apart=1)
        log.add("loss", 0, 10 * logits / (1 if self._gathers_logits else self.tensor), _SINGLE)

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

    def add(self, kind: str, flops: float, moved: float, dtype: int = _HALF, ranks: int = 1, apart: int = 0) -> None:
        self.operations.append(Operation(_KIND[kind], dtype, flops, moved, ranks, apart=apart))


def _divided(parts: Sequence[str], stages: int) -> list[Sequence[str]]:
    # As many on each stage, and one more on the first ones.
    few, more = divmod(len(parts), stages)
    ends = [0, *accumulate(few + (stage < more) for stage in range(stages))]
    return [parts[start:end] for start, end in pairwise(ends)]


def _divided_by_cost(parts: Sequence[str], costs: Mapping[str, float], stages: int) -> list[Sequence[str]]:
    # A stage ends with the part that goes beyond its share of the cost.
    found: list[list[str]] = [[]]
    done = list(accumulate(costs.get(part, 0.0) for part in parts))
    for part, cost in zip(parts, done, strict=True):
        found[-1].append(part)
        if cost > done[-1] * len(found) / stages:
            found.append([])
    return [*found, *[[] for _ in range(stages - len(found))]]
