"""Layouts of a decoder on devices that are not there: bytes by formulas, and the planner's own clocks. Pure.

A decoder with gated feed-forward layers is divided by tensor parallelism (with or without its sequence-parallel
regions), by a pipeline (one forward, one backward) and by data parallelism with ZeRO 0 to 2. Bytes that a layer keeps
are counted as Korthikanti et al. do (arXiv 2205.05198, section 4), tensor by tensor. Nothing here is fitted to the
public grids of launches with which `benchmarks/replay/grids.py` compares it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal

from zerotune.trial_lib.deepspeed_config.layout import AUTOTP
from zerotune.trial_lib.messages.foreseen_run import MOMENTS, OPERATIONS, ForeseenRun, Moment, Operation
from zerotune.trial_lib.messages.turned import CHECKPOINTING
from zerotune.trial_lib.plan.answer import EQUAL
from zerotune.trial_lib.plan.devices import Cluster
from zerotune.trial_lib.plan.fits import CONTEXT, communication
from zerotune.trial_lib.plan.plan_record import PlannedDevices, PlannedLayout, PlannedRange
from zerotune.trial_lib.plan.step_time import PlannedStep, planned_step
from zerotune.trial_lib.search.arms import RequestedKnob

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
_LAYER, _HEAD, _LOSS = "layer", "head", "loss"


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    parameters: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    tokens: int  # of a sample

    @cached_property
    def layer_parameters(self) -> list[float]:
        hidden, ffn = self.hidden, self.ffn
        of_keys = hidden * self.kv_heads / self.heads
        return [hidden * (hidden + 2 * of_keys), hidden * hidden, hidden * 2 * ffn, hidden * ffn]

    @cached_property
    def head_parameters(self) -> float:
        return float(self.vocabulary * self.hidden)

    @cached_property
    def vocabulary_matrices(self) -> int:
        """One if the output layer is the embedding."""
        outside = self.parameters - self.layers * sum(self.layer_parameters)
        return 1 if outside < 1.5 * self.head_parameters else 2

    @property
    def counted_parameters(self) -> float:
        return self.layers * sum(self.layer_parameters) + self.vocabulary_matrices * self.head_parameters


@dataclass(frozen=True, kw_only=True)
class LaidOutDecoder:
    """One configuration of one decoder on some devices."""

    shape: DecoderShape
    cluster: Cluster
    tensor: int = 1  # ranks of a tensor-parallel group
    stages: int = 1  # of the pipeline
    zero_stage: int = 0  # 0 to 2
    micro_batch: int = 1  # samples
    accumulation: int = 1  # micro-batches of a step
    is_checkpointed: bool = False  # whether each layer is computed again in the backward pass
    # How stages share the model: as many layers on each, as many parts (`uniform`), or by what the parts cost
    division: Literal["layers", "uniform", "cost"] = "layers"
    divides_vocabulary: bool = True  # whether tensor-parallel ranks divide the embedding and the output layer too
    divides_norms: bool = False  # whether they divide what lies between the products too
    gathers: bool = False  # whether each of them keeps what it gathers of the others, logits among it
    # How attention and norms are computed: `flash`, `fused` or `torch`, and ` + RMS` if norms are one kernel
    kernel: str = "flash + RMS"
    gradient_bytes: int = 2  # of a parameter's gradient: 4 if sums of 32 bits are kept

    @cached_property
    def replicas(self) -> int:
        return self.cluster.ranks // (self.tensor * self.stages)

    @property
    def is_possible(self) -> bool:
        """Whether each stage of the pipeline has a part of the model, and micro-batches for all but one of them."""
        starved = self.division == "cost" and self.accumulation < self.stages - 1
        return not starved and all(self._by_stage)

    @cached_property
    def _by_stage(self) -> list[Sequence[str]]:
        # The parts of the model on each stage.
        parts = ["embedding", *[_LAYER] * self.shape.layers, "norm", _HEAD]
        if self.division == "cost":
            costs = {_LAYER: sum(self.shape.layer_parameters), _HEAD: self.shape.head_parameters}
            return _divided_by_cost([*parts, "cast", _LOSS], costs, self.stages)
        if self.division != "uniform":
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
        return float(self.micro_batch * self.shape.tokens)

    @property
    def _shared(self) -> int:
        # Ranks that share what tensor parallelism alone leaves whole.
        return self.tensor if self.divides_norms else 1

    @property
    def _of_vocabulary(self) -> int:
        return self.tensor if self.divides_vocabulary else 1

    @property
    def _attention(self) -> str:
        return self.kernel if self.kernel in _SCORES_KEPT else "flash"

    @property
    def _scores(self) -> float:
        # Of all heads of a layer on one rank, in numbers.
        return float(self.shape.heads / self.tensor * self._tokens * self.shape.tokens)

    @cached_property
    def _slowest(self) -> Sequence[str]:
        # The stage that computes most.
        of_layer = sum(self.shape.layer_parameters) + 2 * self.shape.tokens * self.shape.hidden
        costs = {_LAYER: of_layer, _HEAD: self.shape.head_parameters}
        return max(self._by_stage, key=lambda parts: sum(costs.get(part, 0.0) for part in parts))

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

    @property
    def bytes(self) -> float:
        """All of that, of what a process may use."""
        return self.needed + self.outside

    @cached_property
    def _fullest(self) -> tuple[float, float]:
        return max(map(self._bytes_of_stage, range(self.stages)), key=sum)

    def _bytes_of_stage(self, stage: int) -> tuple[float, float]:
        # States and activations. One forward pass more than the stages behind are on their way.
        parts, ahead = self._by_stage[stage], min(self.stages - stage, self.accumulation)
        kept = again = self._kept_by_a_layer
        if self.is_checkpointed:
            kept = 2 * self._tokens * self.shape.hidden / self._shared
        else:
            again = 0.0
        if _LOSS in parts:
            again = max(again, self._tokens * self.shape.vocabulary * self._logit_bytes)
        return self._states_of(parts), parts.count(_LAYER) * kept * ahead + again

    def _states_of(self, parts: Sequence[str]) -> float:
        outside = min(self.shape.vocabulary_matrices, parts.count("embedding") + parts.count(_HEAD))
        parameters = parts.count(_LAYER) * sum(self.shape.layer_parameters) / self.tensor
        parameters += outside * self.shape.head_parameters / self._of_vocabulary
        beside = _BESIDE_SUMS if self.gradient_bytes == 4 and self.replicas > 1 else 0
        kept = _STATE_BYTES / (self.replicas if self.zero_stage else 1)
        gradients = self.gradient_bytes / (self.replicas if self.zero_stage > 1 else 1)
        return parameters * (2 + gradients + beside + kept)

    @property
    def _logit_bytes(self) -> float:
        return _WHOLE_LOGIT_BYTES if self.gathers else _LOGIT_BYTES / self._of_vocabulary

    @property
    def _kept_by_a_layer(self) -> float:
        width, ffn = self._tokens * self.shape.hidden, self._tokens * self.shape.ffn
        of_keys = width * self.shape.kv_heads / self.shape.heads
        # Inputs of both norms, and what they give to the matrices. That is gathered, and may be kept so.
        of_matrices = 4 * width * (self._shared if self.gathers else 1)
        whole = 4 * width + of_matrices + (0 if "RMS" in self.kernel else 2 * _NORM_KEPT * width)
        # Queries, keys, values, and what attention gives; gate and branch, the activated gate, and their product.
        divided = 4 * width + 4 * of_keys + 8 * ffn
        if self._attention != "flash":
            divided += _SCORES_KEPT[self._attention] * self._scores * self.tensor
        return whole / self._shared + divided / self.tensor

    # -- seconds -------------------------------------------------------------------------------------------------

    @cached_property
    def step(self) -> PlannedStep:
        """The foreseen step of all replicas."""
        return planned_step(self._run(), self.cluster)

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
                if self.is_checkpointed:
                    self._layer(log)
                self._layer(log, backward=True)
            self._send(log)
        parameters = layers * sum(self.shape.layer_parameters) / self.tensor
        parameters += max(1, heads) * self.shape.head_parameters / self._of_vocabulary
        is_sharded = bool(self.zero_stage) and self.replicas > 1
        reduces = "reduce_scatter" if is_sharded else "all_reduce"
        log.add(reduces, 0, self.gradient_bytes * parameters, ranks=self.replicas, apart=self.tensor)
        log.begin("update", shown - 1)
        own = parameters / self.replicas if is_sharded else parameters
        log.add("update", 10 * own, _UPDATE_BYTES * own, _SINGLE)
        if is_sharded:
            log.add("all_gather", 0, 2 * parameters, ranks=self.replicas, apart=self.tensor)
        return ForeseenRun(
            world=self.cluster.ranks,
            replicas=self.replicas,
            micro_batch=self.micro_batch,
            accumulation=self.accumulation,
            tokens=self.shape.tokens,
            stage=self.zero_stage,
            pipeline_stages=self.stages,
            ds_config={"zero_optimization": {"stage": self.zero_stage}},
            dtypes=_DTYPES,
            moments=tuple(log.moments),
            operations=tuple(log.operations),
        )

    def _layer(self, log: "_Log", backward: bool = False) -> None:
        width, times = self._tokens * self.shape.hidden, 2 if backward else 1
        (qkv, out, up, down), ffn = self.shape.layer_parameters, self._tokens * self.shape.ffn
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
        if "RMS" in self.kernel:
            log.add("norm", 0, _NORM_MOVED * width / self._shared * times)
            return
        for _ in range(5 * times):
            log.add("norm", 0, _NORM_WRITTEN_OUT / 5 * width / self._shared)

    def _product(self, log: "_Log", parameters: float, times: int) -> None:
        weight = parameters / self.tensor
        inner = self.shape.hidden
        moved = 2 * (self._tokens * inner + weight + self._tokens * weight / inner)
        for _ in range(times):
            log.add("matmul", 2 * self._tokens * weight, moved)

    def _mix(self, log: "_Log", width: float, backward: bool) -> None:
        flops, size = 4 * self._tokens * self.shape.tokens * self.shape.hidden / self.tensor, width / self.tensor
        if self._attention == "flash":
            log.add("attention", flops * (2.5 if backward else 1), size * (16 if backward else 8))
            return
        for _ in range(4 if backward else 2):
            log.add("matmul", flops / 2, 2 * self._scores + 4 * size)
        log.add("elementwise", 0, _SCORES_MOVED[self._attention] * self._scores * (2 if backward else 1))

    def _head(self, log: "_Log", backward: bool = False) -> None:
        of_head = self.shape.head_parameters * self.tensor / self._of_vocabulary
        self._product(log, of_head, 2 if backward else 1)
        logits = self._tokens * self.shape.vocabulary
        if self.gathers and not backward:
            log.add("all_gather", 0, 2 * logits, ranks=self.tensor, apart=1)
        log.add("loss", 0, 10 * logits / (1 if self.gathers else self._of_vocabulary), _SINGLE)

    def _send(self, log: "_Log") -> None:
        # Neighbouring stages lie side by side.
        if self.stages > 1:
            size = 2 * self._tokens * self.shape.hidden / self._shared
            log.add("send", 0, size, ranks=2 * self.cluster.ranks // self.stages)


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


# The layouts that a program can have, and the best of them.

LAYOUTS_BY = (
    "Layouts are foreseen by formulas, for a decoder whose attention is fused. No run shows them. On public grids of "
    "tensor parallelism and pipelines of other frameworks the best of the first five of such a list is the best of all "
    "at the median, and 13 % slower at the mean. 3 % of the five fail."
)
"""How sure the table is: `python -m benchmarks.replay.grids`."""

_MOST = 8  # that are named
_ALIKE = 0.1  # the share by which the parameters may differ from those of such a decoder
_TENSOR_SIZES = (1, 2, 4, 8)
_KINDS = {AUTOTP: "tensor"}


def decoder_of(run: ForeseenRun) -> DecoderShape | str:
    """The shape of a run's model, or why formulas do not know it, as a clause."""
    known = run.program.get("decoder") or {}
    if not known or not run.tokens:
        return (
            "the model has no `config` with layers, heads, widths and vocabulary of a decoder, or its samples no tokens"
        )
    shape = DecoderShape(parameters=run.parameters, tokens=run.tokens, **known)
    if run.trainable < (1 - _ALIKE) * run.parameters:
        return "formulas are for trainings of all weights"
    counted = shape.counted_parameters
    if abs(counted / run.parameters - 1) > _ALIKE:
        return (
            f"a decoder with gated feed-forward layers of its widths has {counted:,.0f} parameters, and the model "
            f"{run.parameters:,}"
        )
    return shape


@dataclass(frozen=True, kw_only=True)
class LayoutChoices:
    """What a program can have."""

    tensors: Sequence[int] = (1,)
    pipelines: Sequence[int] = (1,)
    zero_stages: Collection[int] = (0, 1, 2)
    checkpointing: Sequence[bool] = (False,)
    by_autotp: bool = True  # whether DeepSpeed divides the linear layers, and not the program itself

    @classmethod
    def of(
        cls, run: ForeseenRun, shape: DecoderShape, requests: Sequence[RequestedKnob], zero_stages: Collection[int]
    ) -> "LayoutChoices":
        """Of the sizes that are requested. Without a request for tensor parallelism AutoTP divides the heads."""
        values = {each.layout or _KINDS.get(each.path, ""): each.values for each in requests}
        autotp = [size for size in _TENSOR_SIZES if shape.heads % size == shape.kv_heads % size == 0]
        turnable = run.program.get("turnable", {}).get(CHECKPOINTING)
        is_own = "recomputes" in run.program.get("not_turnable", {}).get(CHECKPOINTING, "")
        return cls(
            tensors=sorted({1, *values.get("tensor", autotp)}),
            pipelines=sorted({run.pipeline_stages, *values.get("pipeline", ())}),
            zero_stages=[stage for stage in zero_stages if stage < 3],
            checkpointing=(False, True) if turnable else (is_own,),
            by_autotp=not any(each.layout == "tensor" for each in requests),
        )

    def on(self, shape: DecoderShape, cluster: Cluster, batch: int) -> Iterator[LaidOutDecoder]:
        """All that share a global batch (samples)."""
        for tensor in self.tensors:
            for stages in self.pipelines:
                replicas, rest = divmod(cluster.ranks, tensor * stages)
                if rest or batch % max(1, replicas) or tensor > cluster.per_host:
                    continue
                of_replica = batch // replicas
                sizes = [2**power for power in range(8) if of_replica % 2**power == 0]
                for zero_stage in self.zero_stages:
                    if stages > 1 and zero_stage > 1:
                        continue
                    for is_checkpointed in self.checkpointing:
                        for size in sizes:
                            yield LaidOutDecoder(
                                shape=shape,
                                cluster=cluster,
                                tensor=tensor,
                                stages=stages,
                                zero_stage=zero_stage,
                                micro_batch=size,
                                accumulation=of_replica // size,
                                is_checkpointed=is_checkpointed,
                                divides_vocabulary=not self.by_autotp,
                                kernel="flash",
                            )


def best_layouts(every: Iterator[LaidOutDecoder], capacity: float) -> tuple[PlannedLayout, ...]:
    """The fastest that fit, each at its best ZeRO stage and micro-batch. `capacity` is in bytes."""
    best: dict[tuple[Any, ...], LaidOutDecoder] = {}
    for each in every:
        key = each.tensor, each.stages, each.is_checkpointed
        if each.is_possible and each.bytes <= capacity and (key not in best or _is_better(each, best[key])):
            best[key] = each
    order = sorted(best.values(), key=lambda each: -each.step.samples_per_s)
    return tuple(_planned(each) for each in order[:_MOST])


def _is_better(one: LaidOutDecoder, other: LaidOutDecoder) -> bool:
    ratio = one.step.samples_per_s / other.step.samples_per_s
    return ratio > EQUAL or (EQUAL * ratio >= 1 and one.bytes < other.bytes)


def _planned(each: LaidOutDecoder) -> PlannedLayout:
    step = each.step
    wide = step.high / step.seconds, step.seconds / step.low
    tokens = step.samples_per_s * each.shape.tokens
    return PlannedLayout(
        tensor=each.tensor,
        pipeline=each.stages,
        replicas=each.replicas,
        zero_stage=each.zero_stage,
        is_checkpointed=each.is_checkpointed,
        micro_batch=each.micro_batch,
        accumulation=each.accumulation,
        bytes=each.bytes,
        tokens_per_s=PlannedRange(value=tokens, low=tokens / wide[0], high=tokens * wide[1]),
    )


def beside_runs(devices: PlannedDevices, layouts: Sequence[PlannedLayout]) -> str:
    """How formulas compare with the run of an arm that both have; empty if there is none."""
    for each in layouts:
        arm = next((arm for arm in devices.arms if arm.label == f"z{each.zero_stage}" and arm.tokens_per_s), None)
        is_own = each.tensor == each.pipeline == 1 and not each.is_checkpointed
        if is_own and arm is not None and arm.tokens_per_s is not None and arm.micro_batch == each.micro_batch:
            ratio = each.tokens_per_s.value / arm.tokens_per_s.value
            return f"Of {arm.label} without a layout they have {ratio:.2f} times the speed that its run has."
    return ""
