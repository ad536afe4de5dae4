"""A foreseen run from the shapes of a transformer, by formulas: a stand-in where the program itself is not run.

It has the operations of a training as eager PyTorch issues them, with FLOPs and bytes counted as a foreseen run counts
them: attention in full, each input and output once. It knows no storages, so it says nothing on memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.foresee.public_gpus.model_of_row import RowProgram, program_of
from zerotune.trial_lib.messages.foreseen_run import MOMENTS, OPERATIONS, ForeseenRun, Moment, Operation

_KIND = {name: index for index, name in enumerate(OPERATIONS)}
DTYPES = ("bfloat16", "float16", "float32", "int64")
ADAM_BYTES = 28.0
"""Bytes that an update reads and writes for a parameter: 16 of master, moments and gradient, 12 written back."""
# DeepSpeed's defaults (deepspeed/runtime/zero/config.py, 0.19.8).
_BUCKET = 5e8


@dataclass
class _Log:
    """Moments and operations as they are written."""

    operations: list[Operation] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    module: int = 0
    is_backward: bool = False

    def begin(self, name: str, micro_batch: int) -> None:
        self.moments.append(Moment(MOMENTS.index(name), 1, micro_batch, 0, len(self.operations)))

    def add(
        self, kind: str, dtype: str, flops: float, moved: float, ranks: int = 1, on_host: int = 0, apart: int = 0
    ) -> None:
        index = DTYPES.index(dtype)
        self.operations.append(Operation(_KIND[kind], index, flops, moved, ranks, self.module, on_host, apart))


@dataclass(frozen=True)
class _Shapes:
    """A row's training with the sizes of one rank."""

    row: Mapping[str, Any]
    program: RowProgram
    shards: int
    sequence: int

    @property
    def tokens(self) -> float:
        """Of a micro-batch on this rank."""
        return self.program.micro_batch * self.program.tokens

    @property
    def half(self) -> str:
        """The number format of its products."""
        return "float16" if self.program.precision == "fp16" else "bfloat16"

    @property
    def is_fused(self) -> bool:
        """Whether one kernel replaces a chain of elementwise operations."""
        return self.program.family == "decoder" or self.program.compiled

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return int(self.row["zero_stage"])

    @property
    def zero_ranks(self) -> int:
        """Ranks that share the states."""
        return max(1, self.program.world // self.shards)

    @property
    def is_fsdp(self) -> bool:
        """Whether PyTorch's own sharding is at work. It gathers a whole layer at once, and reduces in 32 bits."""
        return "fsdp" in self.row["framework"].lower()

    @property
    def layer(self) -> list[float]:
        """Parameters of each matrix of a layer."""
        it = self.program
        h, kv = it.hidden, it.hidden * it.kv_heads / it.heads
        up = [h * it.ffn] * (2 if it.is_gated else 1)
        return [each / self.shards for each in (h * (h + 2 * kv), h * h, *up, h * it.ffn)]


def formula_run(row: Mapping[str, Any]) -> ForeseenRun:
    """Returns the run of one optimizer step of a row's training."""
    program = program_of(row)
    shapes = _Shapes(row, program, row.get("tensor_parallel") or 1, row.get("sequence_parallel") or 1)
    log = _Log()
    accumulation = int(row.get("grad_accum") or 1)
    shown = min(accumulation, 2)
    for index in range(shown):
        log.begin("forward", index)
        _embed(log, shapes)
        for _ in range(row["layers"]):
            _gather(log, shapes)
            _layer(log, shapes)
        _head(log, shapes)
        log.begin("backward", index)
        _head(log, shapes, backward=True)
        waiting = 0.0
        for _ in range(row["layers"]):
            _gather(log, shapes)
            if shapes.program.checkpoints:
                _layer(log, shapes)
            _layer(log, shapes, backward=True)
            waiting = _reduce(log, shapes, waiting, index == shown - 1)
        _flush(log, shapes, waiting + row["vocab"] * row["hidden"] / shapes.shards, index == shown - 1)
    log.begin("update", shown - 1)
    _update(log, shapes)
    zero = {**shapes.program.ds_config["zero_optimization"]}
    if shapes.is_fsdp or "ddp" in row["framework"].lower():
        zero["overlap_comm"] = True
    return ForeseenRun(
        world=row["gpus"],
        replicas=shapes.zero_ranks,
        micro_batch=row["micro_batch"],
        accumulation=accumulation,
        tokens=shapes.program.tokens,
        parameters=shapes.program.parameters,
        stage=shapes.stage,
        formats=(shapes.half,),
        ds_config={**shapes.program.ds_config, "zero_optimization": zero},
        dtypes=DTYPES,
        moments=tuple(log.moments),
        operations=tuple(log.operations),
    )


def _enter(log: _Log, shapes: _Shapes) -> None:
    """Enters a module, which DeepSpeed surrounds with hooks. PyTorch's own sharding does so once for a layer."""
    if not shapes.is_fsdp and not log.is_backward:
        log.module = 1 - log.module


def _passes(log: _Log, shapes: _Shapes, size: float, chain: float, kind: str = "elementwise") -> None:
    """Adds a chain of elementwise operations on `size` bytes. A fused kernel reads and writes once."""
    _enter(log, shapes)
    count = 1 if shapes.is_fused else max(1, round(chain / 2))
    for _ in range(count):
        log.add(kind, shapes.half, size, 2 * size)


def _product(log: _Log, shapes: _Shapes, rows: float, weight: float, inner: float, backward: bool) -> None:
    """Adds a product of `rows` with a matrix of `weight` numbers, whose inner length is `inner`."""
    _enter(log, shapes)
    moved = 2 * (rows * inner + weight + rows * weight / inner)
    for _ in range(2 if backward else 1):
        log.add("matmul", shapes.half, 2 * rows * weight, moved)


def _layer(log: _Log, shapes: _Shapes, backward: bool = False) -> None:
    row, tokens, before = shapes.row, shapes.tokens, log.module
    hidden = row["hidden"]
    size = 2.0 * tokens * hidden
    weights = shapes.layer
    factor = 2 if backward else 1
    log.is_backward = backward
    # In front of attention and of the feed-forward network: a norm, in 32 bits where it is not fused.
    _passes(log, shapes, size * factor, 8 if shapes.program.is_gated else 2, "norm")
    _product(log, shapes, tokens, weights[0], hidden, backward)
    if shapes.program.is_gated:
        _passes(log, shapes, size / shapes.shards * factor, 8)
    _exchange(log, shapes, size, 4 if shapes.sequence > 1 else 0, "all_to_all")
    _attention(log, shapes, backward)
    _product(log, shapes, tokens, weights[1], hidden / shapes.shards, backward)
    _exchange(log, shapes, size, 1 if shapes.shards > 1 else 0, "all_reduce")
    _passes(log, shapes, size * factor, 2 if shapes.program.is_gated else 4)
    _passes(log, shapes, size * factor, 8 if shapes.program.is_gated else 2, "norm")
    for weight in weights[2:-1]:
        _product(log, shapes, tokens, weight, hidden, backward)
    _passes(log, shapes, 2.0 * tokens * row["ffn"] / shapes.shards * factor, 4 if shapes.program.is_gated else 2)
    _product(log, shapes, tokens, weights[-1], row["ffn"] / shapes.shards, backward)
    _exchange(log, shapes, size, 1 if shapes.shards > 1 else 0, "all_reduce")
    _passes(log, shapes, size * factor, 2 if shapes.program.is_gated else 4)
    if shapes.is_fsdp and not backward:
        log.module = 1 - before


def _exchange(log: _Log, shapes: _Shapes, size: float, count: int, kind: str) -> None:
    for _ in range(count):
        ranks = shapes.shards if kind == "all_reduce" else shapes.sequence
        log.add(kind, shapes.half, 0.0, size, ranks, apart=1)


def _attention(log: _Log, shapes: _Shapes, backward: bool) -> None:
    row = shapes.row
    samples, seq = row["micro_batch"], row["seq_len"]
    flops = 4.0 * samples * seq * seq * row["hidden"] / shapes.shards / shapes.sequence
    size = 2.0 * shapes.tokens * row["hidden"] / shapes.shards
    if row.get("flash_attention") is not False:
        log.add("attention", shapes.half, flops * (2.5 if backward else 1), size * (8 if backward else 4))
        return
    scores = 2.0 * samples * row["heads"] / shapes.shards / shapes.sequence * seq * seq
    for _ in range(4 if backward else 2):
        log.add("matmul", shapes.half, flops / 2, scores + 2 * size)
    # Scale, mask, softmax, dropout with its mask of a byte; fused, the first three are one.
    for _ in range(3 if shapes.is_fused else 6):
        log.add("elementwise", shapes.half, scores, 2.25 * scores)


def _embed(log: _Log, shapes: _Shapes) -> None:
    log.add("embedding", shapes.half, 0.0, 4.0 * shapes.tokens * shapes.row["hidden"])


def _head(log: _Log, shapes: _Shapes, backward: bool = False) -> None:
    row = shapes.row
    weight = row["vocab"] * row["hidden"] / shapes.shards
    if shapes.stage == 3:
        log.add("all_gather", shapes.half, 0.0, 2.0 * weight, shapes.zero_ranks)
    _product(log, shapes, shapes.tokens, weight, row["hidden"], backward)
    logits = shapes.tokens * row["vocab"] / shapes.shards
    is_short = shapes.is_fused or shapes.program.loss == "chunked"
    for _ in range(1 if is_short else 3):
        log.add("loss", "float32", logits, 6.0 * logits if is_short else 8.0 * logits)


def _gather(log: _Log, shapes: _Shapes) -> None:
    if shapes.stage != 3:
        return
    weights = shapes.layer
    for size in [sum(weights)] if shapes.is_fsdp else weights:
        if shapes.row["offload_param"] == "cpu":
            log.add("to_device", shapes.half, 0.0, 2.0 * size / shapes.zero_ranks)
        log.add("all_gather", shapes.half, 0.0, 2.0 * size, shapes.zero_ranks)


def _reduce(log: _Log, shapes: _Shapes, waiting: float, is_last: bool) -> float:
    """Reduces what a layer adds, by buckets, and returns the parameters that wait for the next one."""
    waiting += sum(shapes.layer)
    if waiting < shapes.program.ds_config["zero_optimization"].get("reduce_bucket_size", _BUCKET):
        return waiting
    _flush(log, shapes, waiting, is_last)
    return 0.0


def _flush(log: _Log, shapes: _Shapes, size: float, is_last: bool) -> None:
    if shapes.stage < 2 and not is_last:
        return
    # PyTorch reduces in 32 bits unless the row says otherwise.
    wide = shapes.is_fsdp and "reduce in bf16" not in shapes.row["precision"]
    if shapes.zero_ranks > 1:
        kind = "reduce_scatter" if shapes.stage == 3 else "all_reduce"
        log.add(kind, "float32" if wide else shapes.half, 0.0, size * (4 if wide else 2), shapes.zero_ranks)
    if shapes.row["offload_optimizer"] == "cpu":
        log.add("to_host", shapes.half, 0.0, 2.0 * size / shapes.zero_ranks)


def _update(log: _Log, shapes: _Shapes) -> None:
    row = shapes.row
    layers = row["layers"] * sum(shapes.layer) + row["vocab"] * row["hidden"] / shapes.shards
    own = layers / (shapes.zero_ranks if shapes.stage else 1)
    log.add("all_reduce", "float32", 0.0, 4.0, shapes.zero_ranks)
    if row["offload_optimizer"] == "cpu":
        log.add("update", "float32", 10 * own, ADAM_BYTES * own, on_host=1)
        log.add("to_device", shapes.half, 0.0, 2.0 * own)
    else:
        # The norm, the scale, and the optimizer's own pass.
        log.add("reduction", "float32", own, 4.0 * own)
        log.add("elementwise", "float32", own, 8.0 * own)
        pure = shapes.program.precision == "pure bf16"
        log.add("update", "float32", 10 * own, (ADAM_BYTES / 2 if pure else ADAM_BYTES) * own)
    if shapes.stage in (1, 2) and shapes.zero_ranks > 1:
        log.add("all_gather", shapes.half, 0.0, 2.0 * layers, shapes.zero_ranks)
