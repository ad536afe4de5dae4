"""A decoder in one layout on devices that are not there: bytes by formulas, and the planner's own clocks. Pure.

A decoder with gated feed-forward layers is divided by tensor parallelism (with or without its sequence-parallel
regions), by Ulysses, by a pipeline (one forward, one backward), by experts, and by data parallelism with ZeRO. Bytes
that a layer keeps are counted as Korthikanti et al. do (arXiv 2205.05198, section 4), tensor by tensor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from zerotune.trial_lib.messages.foreseen_run import MOMENTS, OPERATIONS, ForeseenRun, Moment, Operation
from zerotune.trial_lib.plan.decoder import EMBEDDING, HEAD, LAYER, LOSS, SPARSE, DecoderShape
from zerotune.trial_lib.plan.device_memory import LiveBytes, live_bytes
from zerotune.trial_lib.plan.devices import COLLECTIVES, ON_MATRIX_UNITS, Cluster
from zerotune.trial_lib.plan.fits import CONTEXT, PROGRAM_ERROR, UNLIKE, PeakForecast, communication, in_all
from zerotune.trial_lib.plan.step_time import PlannedStep, Stretch, kind_of, planned_step, step_of
from zerotune.trial_lib.search.budgets import Uncertain

_KIND = {name: index for index, name in enumerate(OPERATIONS)}
_HALF, _SINGLE = 0, 1
# Of a parameter: 32-bit copy and Adam's states; what an update reads and writes (16 of them and the gradient, 12 back).
_STATE_BYTES, _UPDATE_BYTES = 12, 28
# The same of DeepSpeed's, with the gradients' norm and the copies of other formats, in foreseen runs of its stages.
_UPDATE_BYTES_OF_DEEPSPEED = 70
# Where 32-bit sums are apart, PyTorch's data parallelism has each gradient of 16 bits and a copy in its buckets.
_BESIDE_SUMS = 4
# Of a logit: 16 bits, 32 bits, and its gradient of 32 bits as the backward pass begins.
_LOGIT_BYTES = 10
# `torch.nn.functional.cross_entropy` has the logarithm of its softmax, that one's gradient and the logits' own besides
# the logits of 16 bits. Each rank has all of them, if they are gathered for it.
_WHOLE_LOGIT_BYTES = 14
# What a device has to have for activations, as a multiple of them: the median of 263 foreseen runs of other sources
# (`least`, `allocated` and the states at the peak in row_bytes.json and grid_bytes.json of benchmarks/foresee).
_PIECES = 1.16
# DeepSpeed's defaults, in parameters: gradients that are reduced together, and what stage 3 keeps gathered until the
# backward pass needs it (`stage3_max_reuse_distance`).
_REDUCED, _REUSED = 5e8, 1e9


@dataclass(frozen=True, kw_only=True)
class Writing:
    """How a program writes a layer, beside its matrices and its attention."""

    forward: float = 26.0  # operations that the host issues for a forward pass
    backward: float = 52.0  # likewise
    modules: float = 0.0  # that a forward pass enters
    # Of a norm, for each number of its width: bytes that it reads and writes, and that it keeps beside its input. Five
    # operations of PyTorch in 32 bits keep two copies of 32 bits and one of 16.
    norm_moved: float = 28.0
    norm_kept: float = 10.0
    torch: str = ""  # the version, which decides the kernel of attention; the newest if it is empty
    # Bytes of a score that a softmax reads and writes, and that are kept; 0 if attention is one kernel
    scores_moved: float = 0.0
    scores_kept: float = 0.0
    moved: float = 1.0  # bytes that are read and written, as a multiple of the formulas'
    kept: float = 1.0  # bytes of what tensor parallelism leaves whole, kept for the backward pass, likewise

    @classmethod
    def of(cls, run: ForeseenRun, own: "LaidOutDecoder") -> "Writing":
        """By a foreseen run of a layout of the same decoder. That of a pipeline shows its first stage."""
        first = own.by_stage[0]
        layers = first.count(LAYER) + first.count(SPARSE)
        theirs, mine = _Passes.of(run), _Passes.of(own.as_run(first))
        if not (theirs.forward and theirs.backward):
            return own.writing
        again = own.recomputed / own.shape.layers
        written = replace(
            own.writing,
            forward=theirs.forward / layers,
            backward=(theirs.backward - again * theirs.forward) / layers,
            modules=theirs.modules / layers,
            moved=theirs.moved / mine.moved,
        )
        if own.recomputed or not theirs.kept:
            return written
        whole, divided = map(sum, zip(*map(own.kept_by, first), strict=True))
        beside = divided + own.gathered + (own.kept_of_logits if LOSS in first else 0.0)
        return replace(written, kept=max(theirs.kept - beside, 0.0) / whole)


@dataclass(frozen=True)
class _Passes:
    """The last forward and backward pass of a run."""

    forward: int  # operations of the device
    backward: int
    modules: int  # that the forward pass enters
    moved: float  # bytes of what is neither a product nor attention
    kept: float  # bytes that the forward pass leaves

    @classmethod
    def of(cls, run: ForeseenRun) -> "_Passes":
        last = {stretch.moment: stretch for stretch in step_of(run).last}
        passes = [last.get(name, Stretch(name, ())) for name in ("forward", "backward")]
        forward, backward = map(_of_device, passes)
        others = [each for each in (*forward, *backward) if kind_of(each) not in ON_MATRIX_UNITS]
        peaks = {each.name: each for each in live_bytes(run).moments}
        left = peaks["forward"].at_end - peaks["forward"].at_begin if "forward" in peaks else 0.0
        modules = sum(one.where != other.where for one, other in pairwise(passes[0].operations))
        return cls(len(forward), len(backward), modules, sum(each.moved for each in others), left)


def _of_device(stretch: Stretch) -> list[Operation]:
    beside = (*COLLECTIVES, "to_host", "to_device", "from_disk", "to_disk")
    return [each for each in stretch.operations if kind_of(each) not in beside and (each.moved or each.flops)]


@dataclass(frozen=True, kw_only=True)
class LaidOutDecoder:
    """One configuration of one decoder on some devices."""

    shape: DecoderShape
    cluster: Cluster
    tensor: int = 1  # ranks of a tensor-parallel group
    sequence: int = 1  # ranks that share the tokens of a sample (Ulysses)
    stages: int = 1  # of the pipeline
    expert: int = 1  # ranks that share the experts
    zero_stage: int = 0
    micro_batch: int = 1  # samples
    accumulation: int = 1  # micro-batches of a step
    recomputed: int = 0  # layers that are computed again in the backward pass
    divides_vocabulary: bool = True  # whether tensor-parallel ranks divide the embedding and the output layer too
    divides_norms: bool = False  # whether they divide what lies between the products too
    gathers: bool = False  # whether each of them keeps what it gathers of the others, logits among it
    gradient_bytes: int = 2  # of a parameter's gradient: 4 if sums of 32 bits are kept
    # Whether DeepSpeed trains it. Its buckets then count, and their sums are not scattered. If the vocabulary is not
    # divided, AutoTP divides the linear layers.
    by_deepspeed: bool = False
    zero: Mapping[str, Any] = field(default_factory=dict)  # DeepSpeed's section `zero_optimization`
    writing: Writing = Writing()

    @cached_property
    def replicas(self) -> int:
        return self.cluster.ranks // (self.tensor * self.stages * self.sequence)

    @property
    def _sharing(self) -> int:
        # Ranks over which ZeRO partitions states.
        return self.replicas * self.sequence

    @cached_property
    def by_stage(self) -> list[Sequence[str]]:
        """The parts of the model on each stage of the pipeline: as many layers on each."""
        first, *others = divided(self.shape.layer_parts, self.stages)
        *shares, last = [EMBEDDING, *first], *others
        return [*shares, [*last, HEAD, LOSS]]

    @property
    def _tokens(self) -> float:
        # Of a micro-batch on one rank.
        return self.micro_batch * self.shape.tokens / self.sequence

    @property
    def _shared(self) -> int:
        # Ranks that share what tensor parallelism alone leaves whole.
        return self.tensor if self.divides_norms else 1

    @property
    def _of_vocabulary(self) -> int:
        # Ranks that divide the embedding, and what the output layer gives.
        return self.tensor if self.divides_vocabulary else 1

    @property
    def _is_by_autotp(self) -> bool:
        return self.by_deepspeed and not self.divides_vocabulary

    @property
    def _scores(self) -> float:
        # Of all heads of a layer, in numbers.
        return self.shape.heads * self._tokens * self.shape.tokens

    @cached_property
    def slowest(self) -> Sequence[str]:
        """The parts of the stage that computes most."""
        mixing = 2 * self.shape.tokens * self.shape.of_queries
        costs = {part: self.shape.active(part) + mixing for part in (LAYER, SPARSE)}
        costs[HEAD] = self.shape.of_head_matrix
        return max(self.by_stage, key=lambda parts: sum(costs.get(part, 0.0) for part in parts))

    def _recomputed_of(self, parts: Sequence[str]) -> int:
        return round(self.recomputed * (parts.count(LAYER) + parts.count(SPARSE)) / self.shape.layers)

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
    def outside(self) -> Uncertain:
        """Bytes of the context, and of NCCL for each group that a rank belongs to."""
        groups = [(self.tensor, 1), (self.sequence, 1), (self.expert, 1), (self.replicas, self.tensor * self.sequence)]
        groups.append((self.stages, self.cluster.ranks // self.stages))
        spans = [(ranks, ranks * apart) for ranks, apart in groups if ranks > 1]
        return in_all(CONTEXT, *(communication(max(ranks, span), self.cluster.per_host) for ranks, span in spans))

    @property
    def bytes(self) -> float:
        """All of that, of what a process may use."""
        return self.needed + self.outside.mean

    def fits(self, capacity: float) -> float:
        """The probability that it fits `capacity` bytes."""
        return PeakForecast.of(
            micro_batch=self.micro_batch,
            live=LiveBytes(place="device", moments=()),
            allocated=self.states + self.activations,
            reserved=self.needed,
            least=self.needed,
            outside=self.outside,
            # No peak of such a layout was measured.
            program_error=PROGRAM_ERROR * (UNLIKE if self.shape.experts or self.sequence > 1 else 1.0),
        ).fits(capacity)

    @cached_property
    def _fullest(self) -> tuple[float, float]:
        return max(map(self._bytes_of_stage, range(self.stages)), key=sum)

    def _bytes_of_stage(self, stage: int) -> tuple[float, float]:
        # States and activations. One forward pass more than the stages behind are on their way.
        parts, ahead = self.by_stage[stage], min(self.stages - stage, self.accumulation)
        layers = [part for part in parts if part in (LAYER, SPARSE)]
        again = self._recomputed_of(parts)
        of_layers = [sum(self.kept_by(part)) for part in layers]
        kept = sum(of_layers[again:]) + again * 2 * self._tokens * self.shape.hidden / self._shared
        beside = max(of_layers[:again], default=0.0)
        if LOSS in parts:
            of_logit = _WHOLE_LOGIT_BYTES if self.gathers else _LOGIT_BYTES / self._of_vocabulary
            beside = max(beside, self._tokens * self.shape.vocabulary * of_logit)
        states = sum(self._state_bytes(own, sharing) for own, sharing, _ in self._by_group(self._held(parts)))
        return states + self._buffers, kept * ahead + beside

    def _held(self, parts: Sequence[str]) -> list[str]:
        # Those that have parameters. Embedding and output layer may be one.
        outside = [part for part in parts if part in (EMBEDDING, HEAD)]
        return [*(part for part in parts if part in (LAYER, SPARSE)), *outside[: self.shape.vocabulary_matrices]]

    def _state_bytes(self, parameters: float, sharing: int) -> float:
        beside = _BESIDE_SUMS if self.gradient_bytes == 4 and sharing > 1 else 0
        kept = _STATE_BYTES / (sharing if self.zero_stage else 1)
        gradients = self.gradient_bytes / (sharing if self.zero_stage > 1 else 1)
        weights = 2 / (sharing if self.zero_stage > 2 else 1)
        return parameters * (weights + gradients + beside + kept)

    @property
    def _buffers(self) -> float:
        # DeepSpeed's buckets of gradients, and what stage 3 has gathered.
        if not self.by_deepspeed or not self.zero_stage:
            return 0.0
        buckets = 2 if self.zero.get("overlap_comm") and self.zero_stage < 3 else 1
        size = buckets * (4 if self.sequence > 1 else 2)
        return size * self._of_zero("reduce_bucket_size", _REDUCED) + self.gathered

    @property
    def gathered(self) -> float:
        """Bytes of the parameters that stage 3 keeps from a forward to a backward pass."""
        whole = sum(map(self._parameters, self.slowest)) if self.zero_stage > 2 else 0.0
        return 2 * min(whole, self._of_zero("stage3_max_reuse_distance", _REUSED))

    def _of_zero(self, key: str, default: float) -> float:
        given = self.zero.get(key)
        return float(given) if isinstance(given, int | float) else default

    def _parameters(self, part: str) -> float:
        # Of a part, on a rank that has gathered them.
        if part in (HEAD, EMBEDDING):
            # AutoTP divides the output layer alone and gathers the logits (`colwise_gather_output` of transformers).
            return self.shape.of_head_matrix / (self.tensor if part == HEAD else self._of_vocabulary)
        if part not in (LAYER, SPARSE):
            return 0.0
        return self.shape.shared_parameters(part) / self.tensor + self.shape.expert_parameters(part) / self.expert

    @property
    def kept_of_logits(self) -> float:
        """Bytes that the loss keeps for the backward pass: logits in 16 and in 32 bits."""
        return self._tokens * self.shape.vocabulary * 6 / self._of_vocabulary

    def kept_by(self, part: str) -> tuple[float, float]:
        """Bytes that the forward pass of a part leaves: what tensor parallelism leaves whole, and what it divides."""
        if part not in (LAYER, SPARSE):
            return 0.0, 0.0
        shape, width = self.shape, self._tokens * self.shape.hidden
        # Inputs of both norms, and what they give to the matrices. That is gathered, and may be kept so.
        of_matrices = 4 * width * (self._shared if self.gathers else 1)
        whole = 4 * width + of_matrices + 2 * self.writing.norm_kept * width
        # Queries, keys, values, and what attention gives; gate and branch, the activated gate, and their product.
        divided = self._tokens * (4 * shape.of_queries + 4 * shape.of_keys + 8 * shape.gated(part)[1] / shape.hidden)
        divided += self.writing.scores_kept * self._scores
        if part == SPARSE:
            # Likewise of each expert that a token has, with the token as it goes there and as it comes back.
            divided += self._tokens * shape.chosen * (8 * shape.expert_ffn + 4 * shape.hidden)
        return self.writing.kept * whole / self._shared, divided / self.tensor

    @cached_property
    def step(self) -> PlannedStep:
        """The foreseen step of all replicas."""
        return planned_step(self.as_run(), self.cluster)

    def as_run(self, parts: Sequence[str] = ()) -> ForeseenRun:
        """The operations of a stage with some parts, or else of the slowest, as a run without storages has them."""
        log, parts = _Log(), parts or self.slowest
        layers = [part for part in parts if part in (LAYER, SPARSE)]
        heads, again = parts.count(HEAD), self._recomputed_of(parts)
        held, shown = self._held(parts), min(2, self.accumulation)
        for index in range(shown):
            log.begin("forward", index)
            self._send(log)
            for part in held[len(layers) :]:
                self._gather(log, part)
            for part in layers:
                self._layer(log, part)
            for _ in range(heads):
                self._head(log)
            log.begin("backward", index)
            reduces = self.zero_stage > 1 or (self.zero_stage == 1 and index == shown - 1)
            for _ in range(heads):
                self._head(log, backward=True)
            passed, reused = 0.0, self._of_zero("stage3_max_reuse_distance", _REUSED)
            for place, part in enumerate(reversed(layers)):
                passed += self._parameters(part)
                if place < again:
                    self._layer(log, part)
                self._layer(log, part, backward=True, gathers=place >= again and passed > reused)
                if reduces:
                    self._reduce(log, part)
            for part in held[len(layers) :] if reduces else ():
                self._reduce(log, part)
            if self.gradient_bytes == 4:
                # Each gradient of 16 bits is added to its sum.
                log.add("elementwise", 0, 10 * sum(map(self._parameters, held)))
            self._send(log)
        if not self.zero_stage:
            for part in held:
                self._reduce(log, part)
        log.begin("update", shown - 1)
        for parameters, sharing, apart in self._by_group(held):
            is_sharded = bool(self.zero_stage) and sharing > 1
            own = parameters / sharing if is_sharded else parameters
            moved = _UPDATE_BYTES_OF_DEEPSPEED if self.by_deepspeed else _UPDATE_BYTES
            log.add("update", 10 * own, moved * own, _SINGLE)
            if is_sharded and self.zero_stage < 3:
                log.add("all_gather", 0, 2 * parameters, ranks=sharing, apart=apart)
        return ForeseenRun(
            world=self.cluster.ranks,
            replicas=self.replicas,
            micro_batch=self.micro_batch,
            accumulation=self.accumulation,
            tokens=self.shape.tokens,
            sequence_ranks=self.sequence,
            stage=self.zero_stage,
            pipeline_stages=self.stages,
            ds_config={"zero_optimization": {**self.zero, "stage": self.zero_stage}},
            dtypes=("bfloat16", "float32"),
            versions={"torch": self.writing.torch},
            moments=tuple(log.moments),
            operations=tuple(log.operations),
        )

    def _by_group(self, parts: Sequence[str]) -> list[tuple[float, int, int]]:
        # Parameters on a rank, the ranks that have the same ones, and how far these are apart: of experts, and of all
        # other parts.
        experts = sum(map(self.shape.expert_parameters, parts)) / self.expert
        shared = sum(map(self._parameters, parts)) - experts
        groups = [(shared, self._sharing, self.tensor), (experts, max(1, self._sharing // self.expert), self.expert)]
        return [group for group in groups if group[0]]

    def _reduce(self, log: "_Log", part: str) -> None:
        scatters = self.zero_stage > 2 or (self.zero_stage and not self.by_deepspeed)
        for parameters, sharing, apart in self._by_group([part]):
            # Under Ulysses DeepSpeed copies gradients into 32 bits and back (`seq_parallel_communication_data_type`).
            size = (4 if self.sequence > 1 else self.gradient_bytes) * parameters
            if self.sequence > 1:
                log.add("copy", 0, 12 * parameters)
            log.add("reduce_scatter" if scatters else "all_reduce", 0, size, ranks=sharing, apart=apart)

    def _gather(self, log: "_Log", part: str) -> None:
        for parameters, sharing, apart in self._by_group([part]) if self.zero_stage > 2 else ():
            log.add("all_gather", 0, 2 * parameters, ranks=sharing, apart=apart)

    def _layer(self, log: "_Log", part: str, backward: bool = False, gathers: bool = True) -> None:
        shape, width, times = self.shape, self._tokens * self.shape.hidden, 2 if backward else 1
        if gathers:
            self._gather(log, part)
        begun = len(log.operations)
        qkv, out = shape.attention
        self._product(log, qkv, self._tokens, times)
        self._exchange_heads(log)
        self._mix(log, backward)
        self._product(log, out, self._tokens, times)
        self._sum_up(log, width, 3 if backward else 1)
        up, down = shape.gated(part)
        if up:
            self._product(log, up, self._tokens, times)
            self._product(log, down, self._tokens, times)
        if part == SPARSE:
            self._experts(log, times)
        self._sum_up(log, width, 2 if backward else 1)
        of_ffn = up / (2 * shape.hidden) + (shape.chosen * shape.expert_ffn if part == SPARSE else 0)
        moved = width * (2 * self.writing.norm_moved * times + 12) / self._shared
        moved += (8 * self._tokens * shape.of_queries + 10 * self._tokens * of_ffn) / self.tensor * times
        issued = sum(OPERATIONS[each.kind] not in COLLECTIVES for each in log.operations[begun:])
        count = max(1, round((self.writing.backward if backward else self.writing.forward) - issued))
        for _ in range(count):
            log.add("elementwise", 0, self.writing.moved * moved / count)
        log.enter(0 if backward else round(self.writing.modules), begun)

    def _product(self, log: "_Log", parameters: float, tokens: float, times: int, weights: float = 1.0) -> None:
        # `weights` is how many such matrices the tokens are divided among.
        weight, inner = parameters / self.tensor, self.shape.hidden
        moved = 2 * (tokens * inner + weights * weight + tokens * weight / inner)
        for _ in range(times):
            log.add("matmul", 2 * tokens * weight, moved)

    def _exchange_heads(self, log: "_Log") -> None:
        # Ulysses: queries, keys and values go to the ranks that have their heads, and come back mixed. Each is put in
        # order three times (`UlyssesSPAttentionHF.forward`). Fewer key-value heads than ranks are repeated.
        if self.sequence == 1:
            return
        keys = max(self.shape.kv_heads, self.sequence) * self.shape.of_head
        for size in (self.shape.of_queries, keys, keys, self.shape.of_queries):
            log.add("copy", 0, 12 * self._tokens * size)
            log.add("all_to_all", 0, 2 * self._tokens * size, ranks=self.sequence, apart=1)

    def _mix(self, log: "_Log", backward: bool) -> None:
        size = self._tokens * self.shape.of_queries / self.tensor
        flops = 4 * size * self.shape.tokens
        if not self.writing.scores_kept:
            log.add("attention", flops * (2.5 if backward else 1), size * (16 if backward else 8))
            return
        for _ in range(4 if backward else 2):
            log.add("matmul", flops / 2, 2 * self._scores / self.tensor + 4 * size)
        moved = self.writing.scores_moved * self._scores / self.tensor
        log.add("elementwise", 0, moved * (2 if backward else 1))

    def _sum_up(self, log: "_Log", width: float, matrices: int) -> None:
        # AutoTP sums the gradient of each matrix's input apart (ColumnParallel in deepspeed/module_inject/layers.py).
        for _ in range(matrices if self._is_by_autotp else 1):
            log.add("all_reduce", 0, 2 * width, ranks=self.tensor, apart=1)

    def _experts(self, log: "_Log", times: int) -> None:
        shape, sent = self.shape, self._tokens * self.shape.chosen
        self._product(log, shape.hidden * shape.experts, self._tokens, times)
        for _ in range(2):
            log.add("all_to_all", 0, 2 * sent * shape.hidden, ranks=self.expert, apart=1)
            log.add("copy", 0, 4 * sent * shape.hidden)
        for matrices in (2, 1):
            self._product(log, matrices * shape.hidden * shape.expert_ffn, sent, times, shape.experts / self.expert)

    def _head(self, log: "_Log", backward: bool = False) -> None:
        self._product(log, self.shape.of_head_matrix, self._tokens, 2 if backward else 1)
        logits = self._tokens * self.shape.vocabulary
        if backward:
            self._sum_up(log, self._tokens * self.shape.hidden, 1)
        elif self.gathers or self._is_by_autotp:
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
        if ranks > 1 or kind not in COLLECTIVES:
            self.operations.append(Operation(_KIND[kind], dtype, flops, moved, ranks, apart=apart))

    def enter(self, modules: int, begun: int) -> None:
        """Divides the operations since `begun` among so many modules that take turns."""
        own = len(self.operations) - begun
        for place in range(own) if modules else ():
            changed = self.operations[begun + place]._replace(where=1 + place * min(modules, own) // own % 2)
            self.operations[begun + place] = changed


def divided(parts: Sequence[str], stages: int) -> list[Sequence[str]]:
    """As many on each stage, and one more on the first ones."""
    few, more = divmod(len(parts), stages)
    ends = [0, *accumulate(few + (stage < more) for stage in range(stages))]
    return [parts[start:end] for start, end in pairwise(ends)]
