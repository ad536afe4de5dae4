"""The training program of a public measurement: model, batch and DeepSpeed configuration, from the row's facts.

Pure: it imports neither torch nor DeepSpeed. `row_training.py` is the program itself.

The rules are the same for all rows:

* A framework that names Hugging Face, or an issue of a Hugging Face user, means a model of `transformers`. All others
  are the plain decoder of `decoder.py`, whose kernels are fused as those of Megatron are.
* Gated or plain feed-forward, and tied or separate embeddings, are those that give the row's number of parameters.
* A program that says nothing of activation checkpointing has none. "Selective" means every second layer.
* torchtitan's default is selective by operation (`_SELECTS_OPERATIONS`). Its compiled loss keeps logits in 16 bits.
* llm-foundry's default loss (`fused_crossentropy`) keeps logits in 16 bits.
* A V100 has no kernel of fused attention, so a program there has none unless its source says so. Models of
  `transformers` there are older than release 4.45, so GPT-2 computes its loss in the precision of its logits.
* litgpt ties no embeddings unless it is asked to.
* FSDP is ZeRO 3 (full shard) whose buckets are one layer, and DDP is ZeRO 0.
* The SFTTrainer's AdamW is torch's own, which updates all parameters at once. Its peaks with all weights trained are
  those of weights, gradients, two states and one copy of them.
* Weights of 4 bits are those of the linear layers within the layers. Products take them as a copy in 16 bits, in both
  passes (`MatMul4Bit` of bitsandbytes, `dequant248` of AutoGPTQ).
* Ulysses divides the sequence among its ranks. All of them share ZeRO's shards. The plain decoder does that, and
  tensor parallelism as Megatron has it, for all frameworks.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks.foresee.public_gpus.row_facts import facts_of
from benchmarks.foresee.public_gpus.sound_rows import MISTAKES, rows_of
from zerotune.trial_lib.messages.errors import InputError

ROWS = Path(__file__).parent / "rows.jsonl"
GRID_ROWS = Path(__file__).parent / "grid_rows.jsonl"
"""Full fine-tuning and LoRA by the Trainer, a grid of batches, devices and kernels of one source."""

_HUGGING_FACE = ("hf ", "hf)", "(hf", "hugging face", "deepspeed-chat", "xtuner", "accelerate", "colossalai")
_FAMILIES = (
    ("gpt_bigcode", "gpt_bigcode"),
    ("falcon", "falcon"),
    ("pythia", "gpt_neox"),
    ("neox", "gpt_neox"),
    ("opt", "opt"),
    ("gpt", "gpt2"),
    ("qwen2", "qwen2"),
    ("qwen3", "qwen2"),
)
_LEARNED_POSITIONS = ("gpt2", "gpt_bigcode", "opt")
_GATED_FAMILIES = ("llama", "qwen2")
_HIDDEN_BUCKETS = 0.9, 10
_NEEDED = ("layers", "hidden", "heads", "vocab", "ffn", "seq_len", "micro_batch", "gpus")
# Its states have the bytes of Adam's, or DeepSpeed has it. A row without a word has AdamW.
_KNOWN_OPTIMIZERS = r"^$|adam|muon|lamb"
# Experts, an encoder beside the decoder, or shapes of another model: parameters that differ by more are not the row's.
_LIKE = 1.4
# Fields that were added later, and their values if they say nothing.
_ADDED = {
    **dict.fromkeys(("checkpoints_by_operation", "has_fused_norm", "is_narrow", "quantized"), False),
    **{"lora": 0, "adapters": 0, "shards": 1, "divided": 1},
}
# Frameworks whose RMS norm is one kernel (nanotron's `TritonRMSNorm` in src/nanotron/models/llama.py).
_FUSED_NORM = ("nanotron",)
# Frameworks whose configurations recompute by operation unless they say otherwise (torchtitan's `SelectiveAC`).
_SELECTS_OPERATIONS = ("torchtitan",)


@dataclass(frozen=True, kw_only=True)
class RowProgram:
    """A training program of a row.

    Attributes:
        family: a family of `transformers`, or `decoder`.
        layers: transformer layers.
        hidden: width.
        heads: of attention.
        kv_heads: of keys and values.
        ffn: width of the feed-forward part.
        vocab: tokens of the vocabulary.
        tokens: of a sample on one rank.
        is_gated: whether the feed-forward part has a gate.
        is_tied: whether the output layer is the embedding.
        has_positions: whether positions are learned.
        attention: `fused` or `eager`.
        checkpoints: whether a layer keeps its input alone for the backward pass.
        checkpoint_every: how many layers there are for each that does.
        checkpointed_layers: layers of one such piece.
        has_fused_norm: whether the RMS norm of the plain decoder is one kernel.
        checkpoints_by_operation: whether such a piece also keeps attention and every second product of matrices.
        loss: `full`; `half`, which computes in 16 bits; `chunked` and `compiled`, which keep logits in 16 bits;
            `in place` and `wide in place`, whose gradient takes the place of logits in 16 or 32 bits; `fused`, which
            keeps none; or `value head`.
        compiled: whether elementwise parts are fused and computed again, as torch.compile does.
        is_plain: whether the source had one device and no DeepSpeed.
        precision: `bf16`, `fp16`, `fp32`, or `pure bf16` if all states have 16 bits.
        micro_batch: samples.
        accumulation: micro-batches of an optimizer step.
        world: ranks that ZeRO partitions over.
        per_node: ranks of one host.
        ds_config: the configuration of DeepSpeed.
        shards: ranks that share each matrix by tensor parallelism. The vocabulary is divided too.
        divided: ranks that share each sequence. `tokens` are those of one.
        is_narrow: whether the device has no room for two copies of the parameters. Stages 1 and 2 then flatten them by
            way of the host (deepspeed/runtime/zero/stage_1_and_2.py, 0.19.8).
        lora: rank of the adapters beside each linear layer of a model whose own weights are trained too; 0 for none.
        adapters: rank of the adapters beside the projections of attention, if they alone are trained; 0 for none.
        quantized: whether the weights of the layers have 4 bits, as QLoRA and GPTQ have them.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tokens: int
    is_gated: bool
    is_tied: bool
    has_positions: bool
    attention: str
    checkpoints: bool
    checkpoint_every: int = 1
    checkpointed_layers: int = 1
    loss: str = "full"
    compiled: bool = False
    is_plain: bool = False
    precision: str = "bf16"
    micro_batch: int = 1
    accumulation: int = 1
    world: int = 1
    per_node: int = 8
    ds_config: dict[str, Any] = field(default_factory=dict)
    shards: int = 1
    divided: int = 1
    checkpoints_by_operation: bool = False
    has_fused_norm: bool = False
    lora: int = 0
    adapters: int = 0
    is_narrow: bool = False
    quantized: bool = False

    @property
    def layer_parameters(self) -> int:
        """About the parameters of a layer, without biases and norms."""
        return _parameters(1, self.hidden, self.heads, self.kv_heads, self.ffn, self.is_gated)

    @property
    def parameters(self) -> int:
        """About the parameters of the model, without biases and norms."""
        return self.layers * self.layer_parameters + self.parameters_outside

    @property
    def parameters_outside(self) -> int:
        """Parameters that are in no layer."""
        return (1 if self.is_tied or self.loss == "value head" else 2) * self.vocab * self.hidden

    def to_json(self) -> dict[str, Any]:
        """Returns plain data."""
        return asdict(self)

    @property
    def key(self) -> str:
        """A name of the program for a cache. A field that was added later counts if it is set."""
        plain = {name: value for name, value in self.to_json().items() if name not in _ADDED or value != _ADDED[name]}
        return sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def read_rows(path: Path = ROWS) -> list[dict[str, Any]]:
    """Returns a row for each line, with the facts that its words have. `lacks` says which have no program.

    Raises:
        InputError: the file cannot be read, or has no lines.
    """
    try:
        rows = [facts_of(row) for row in rows_of(path.read_text(encoding="utf-8", errors="replace"))]
    except OSError as error:
        raise InputError(f"{error.strerror}.", where=str(path), remedy="Give a file with a row in each line.") from None
    if not rows:
        raise InputError("It has no rows.", where=str(path), remedy="Give a file with a row in each line.")
    return rows


def lacks(row: Mapping[str, Any]) -> str:
    """Returns what keeps a row from having a program, in words; empty if nothing does."""
    if why := has_no_program(row):
        return why
    if row["tensor_parallel"] != 1 or row["pipeline_parallel"] != 1:
        return "tensor or pipeline parallelism"
    offloads = {row["offload_optimizer"], row["offload_param"]}
    if "unknown" in offloads:
        return "offload not stated"
    if row.get("checkpoints_in_host"):
        return "checkpoints in the host's memory"
    if re.search(r"bert|\bbart\b|\bvit\b", row["model"].lower()):
        return "an encoder"
    if not re.search(_KNOWN_OPTIMIZERS, row["optimizer"].lower()):
        return f"states of the optimizer {row['optimizer']}"
    return ""


def has_no_program(row: Mapping[str, Any]) -> str:
    """Returns why neither memory nor speed of a row can be foreseen, in words; empty if nothing speaks against it."""
    if row.get("unusable"):
        return str(row["unusable"])
    missing = [name for name in _NEEDED if not row.get(name)]
    missing += ["zero_stage"] if row.get("zero_stage") is None else []
    if missing:
        return f"no {', '.join(missing)}"
    if row.get("trains_adapters_alone") and not _adapters(row):
        return "adapters alone are trained"
    if row.get("quantization") and not (_is_of_4_bits(row) and _adapters(row)):
        return f"weights of {row['quantization']}"
    if others := {row["offload_optimizer"], row["offload_param"]} - {"none", "cpu", "unknown"}:
        return f"offload to {' and '.join(sorted(others))}"
    try:
        has = program_of(row).parameters
    except MISTAKES as error:
        return f"{type(error).__name__}: {error}"
    if row.get("params") and not 1 / _LIKE < has / row["params"] < _LIKE:
        return f"its shapes have {has / 1e9:.3g} billion parameters, where it says {row['params'] / 1e9:.3g}"
    return ""


def program_of(row: Mapping[str, Any]) -> RowProgram:
    """Returns the program of a row that lacks nothing."""
    family = _family(row)
    is_gated, is_tied = _shape(row, family)
    is_tied = is_tied and "litgpt" not in row["framework"].lower()
    divided = int(row.get("sequence_parallel") or 1)
    checkpoints, words = row.get("activation_checkpointing"), row["framework"].lower()
    is_selective = str(checkpoints).startswith("selective")
    by_default = any(each in words for each in _SELECTS_OPERATIONS) and is_default(row)
    by_operation = by_default or (is_selective and re.search(r"\bop", str(checkpoints)) is not None)
    precision = _precision(row)
    program = RowProgram(
        family=family,
        layers=row["layers"],
        hidden=row["hidden"],
        heads=row["heads"],
        kv_heads=row.get("kv_heads") or row["heads"],
        ffn=row["ffn"],
        vocab=row["vocab"],
        tokens=row["seq_len"] // divided,
        is_gated=is_gated,
        is_tied=is_tied,
        has_positions=family in _LEARNED_POSITIONS or (family == "decoder" and not is_gated),
        attention="eager" if _is_eager(row) else "fused",
        checkpoints=checkpoints is True or is_selective or by_operation,
        checkpoint_every=2 if is_selective and not by_operation else 1,
        checkpointed_layers=row.get("checkpointed_layers", 1),
        checkpoints_by_operation=by_operation,
        has_fused_norm=family == "decoder" and is_gated and any(each in words for each in _FUSED_NORM),
        loss=row.get("loss") or _loss(words, is_old=_is_old(row, family)),
        compiled=bool(row.get("compiled")),
        is_plain=row["gpus"] == 1 and row["zero_stage"] == 0 and "deepspeed" not in row["framework"].lower(),
        precision=precision,
        micro_batch=row["micro_batch"],
        accumulation=min(2, row.get("grad_accum") or 1),
        world=row["gpus"],
        per_node=min(row["gpus"], row.get("gpus_per_node") or 8),
        shards=int(row.get("tensor_parallel") or 1),
        divided=divided,
        lora=row.get("lora") or 0,
        adapters=_adapters(row),
        quantized=_is_of_4_bits(row),
    )
    copies, has = 2 * 2 * program.parameters / program.shards, row.get("gpu_memory_gib")
    is_narrow = row["zero_stage"] in (1, 2) and has is not None and copies > has * 2**30
    return replace(program, ds_config=_ds_config(row, program), is_narrow=is_narrow)


def is_default(row: Mapping[str, Any]) -> bool:
    """Returns whether a row's source says that its framework's default decides on activation checkpointing."""
    return "default" in str(row.get("activation_checkpointing")).lower()


def is_decided(row: Mapping[str, Any]) -> bool:
    """Returns whether a row states what decides its memory: whether activations are recomputed.

    The default of a framework counts if the source says that it was used, and if that default is documented.
    "Selective" alone leaves open how many layers recompute.
    """
    stated = row.get("activation_checkpointing")
    if "activation_checkpointing" not in row.get("missing", ()) and stated not in (None, "unknown", "selective"):
        return True
    return is_default(row) and any(each in row["framework"].lower() for each in _SELECTS_OPERATIONS)


def _adapters(row: Mapping[str, Any]) -> int:
    """Returns the rank of LoRA's adapters beside the projections of attention, if they alone are trained; else 0."""
    # GPTs of BigCode alone have a `c_attn`.
    has = {*str(row.get("lora_targets")).split()} - {"c_attn"}
    is_known = has == {"k_proj", "o_proj", "q_proj", "v_proj"} and "gpt_bigcode" not in row["model"]
    return int(row.get("lora_rank") or 0) if row.get("trains_adapters_alone") and is_known else 0


def _is_of_4_bits(row: Mapping[str, Any]) -> bool:
    return "4 bit" in str(row.get("quantization"))


def _is_eager(row: Mapping[str, Any]) -> bool:
    stated = row.get("flash_attention")
    return stated is False or (stated is None and "v100" in row["gpu_kind"].lower())


def _is_old(row: Mapping[str, Any], family: str) -> bool:
    """Returns whether a model is of a release of `transformers` before 4.45 that left logits in their precision."""
    return family == "gpt_bigcode" or (family == "gpt2" and "v100" in row["gpu_kind"].lower())


def _loss(framework: str, *, is_old: bool) -> str:
    if is_old:
        return "half"
    if "llm-foundry" in framework:
        return "chunked"
    return "compiled" if "torchtitan" in framework and "compile" in framework else "full"


def _family(row: Mapping[str, Any]) -> str:
    words = f"{row['framework']} ".lower()
    if max(row.get("sequence_parallel") or 1, row.get("tensor_parallel") or 1) > 1:
        return "decoder"
    from_issue = "issues/" in row["source"] and "megatron" not in words
    if not (from_issue or any(each in words for each in _HUGGING_FACE)):
        return "decoder"
    model = row["model"].lower()
    # GPTQ is a format of weights.
    return next((family for name, family in _FAMILIES if re.search(f"{name}(?!q)", model)), "llama")


def _parameters(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, is_gated: bool) -> int:
    attention = hidden * hidden * 2 + 2 * hidden * (hidden // heads) * kv_heads
    return layers * (attention + (3 if is_gated else 2) * hidden * ffn)


def _shape(row: Mapping[str, Any], family: str) -> tuple[bool, bool]:
    """Returns whether the model has a gate, and whether its embeddings are tied."""
    named = {"falcon": (False, True), "opt": (False, True), "gpt2": (False, True), "gpt_neox": (False, False)}
    named["gpt_bigcode"] = named["gpt2"]
    if family in named:
        return named[family]
    if not row.get("params"):
        return family in _GATED_FAMILIES, family == "decoder"
    sizes = [row[name] for name in ("layers", "hidden", "heads")]
    choices = [(gated, tied) for gated in (True, False) for tied in (True, False)]

    def miss(choice: tuple[bool, bool]) -> float:
        gated, tied = choice
        blocks = _parameters(*sizes, row.get("kv_heads") or row["heads"], row["ffn"], gated)
        return abs(blocks + (1 if tied else 2) * row["vocab"] * row["hidden"] - row["params"])

    return min((each for each in choices if family == "decoder" or each[0]), key=miss)


def _precision(row: Mapping[str, Any]) -> str:
    words = str(row["precision"]).lower()
    # Composer's PURE mixed precision casts what it gathers and reduces. Its states have 32 bits.
    if ("pure" in words or "-true" in words) and "reduce" not in words:
        return "pure bf16"
    return "fp16" if words.startswith("fp16") else "bf16" if "bf16" in words else "fp32"


def _ds_config(row: Mapping[str, Any], program: RowProgram) -> dict[str, Any]:
    stage = row["zero_stage"]
    zero: dict[str, Any] = {"stage": stage}
    for name, key in (("offload_optimizer", "offload_optimizer"), ("offload_param", "offload_param")):
        if row.get(name) == "cpu" and (key == "offload_optimizer" or stage == 3):
            zero[key] = {"device": "cpu", "pin_memory": True}
    zero.update(_buckets(row, program))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": program.micro_batch,
        "gradient_accumulation_steps": program.accumulation,
        "zero_optimization": zero,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
    }
    if "sfttrainer" in row["framework"].lower() and not stage:
        config["optimizer"]["params"].update({"torch_adam": True, "foreach": True})
    if program.precision == "fp16":
        config["fp16"] = {"enabled": True}
    elif program.precision == "bf16":
        config["bf16"] = {"enabled": True}
    elif program.precision == "pure bf16" and stage:
        config["bf16"] = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    return config


def _buckets(row: Mapping[str, Any], program: RowProgram) -> dict[str, Any]:
    stage, hidden = row["zero_stage"], program.hidden
    words = f"{row['framework']}".lower()
    if "fsdp" in words:
        layer = _parameters(1, hidden, program.heads, program.kv_heads, program.ffn, program.is_gated) // program.shards
        return {
            "reduce_bucket_size": layer,
            "stage3_prefetch_bucket_size": layer,
            "stage3_max_live_parameters": 2 * layer,
            "stage3_max_reuse_distance": layer,
            "stage3_param_persistence_threshold": 0,
        }
    auto = {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(_HIDDEN_BUCKETS[0] * hidden * hidden),
        "stage3_param_persistence_threshold": _HIDDEN_BUCKETS[1] * hidden,
    }
    stated = row.get("ds") or {}
    found = auto if stage == 3 and "trainer" in words else {}
    for name, value in stated.items():
        if isinstance(value, str):
            if value.startswith("auto") and name in auto:
                found = {**found, name: auto[name]}
        elif isinstance(value, bool):
            found = {**found, name: value}
        else:
            found = {**found, name: int(value)}
    # Quantised communication needs kernels of a device. Its buffers are not foreseen.
    return {name: value for name, value in found.items() if not name.startswith("zero_quantized")}
