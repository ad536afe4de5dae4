"""Libraries beside torch and DeepSpeed in a foreseen run: kernels of their own, and what they ask of a computer.

* Attention is that of the kernel which CUDA would take, whether torch, flash-attn or transformers has it.
* A Triton kernel computes nothing, and its launch is noted. The code around it is Python, and makes all outputs and
  temporaries by torch. So their sizes are the library's own, in whatever version is installed.
* Operators of bitsandbytes have fake implementations of their own. What they lack is added: FLOPs, the number of
  outliers, and memory that CUDA moves between device and host.
* A class of parameters of a library's own makes its objects by `Tensor._make_subclass`, which refuses a fake tensor. So
  a class is made that is both.
* Liger and bitsandbytes choose sizes and kernels by the word `cuda` (`if tensor.device.type == "cuda"`). Torch has no
  place to answer that. So the word is replaced in their code while it is loaded. Functions of torch take either.
* Nobody knows which tokens a model would generate, nor at which it would end. So each text gets as long as the program
  lets it, and then consists of one token that ends nothing. The program can read it, and score it.
"""

import functools
import itertools
import math
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedParameter
from torch.utils.flop_counter import flop_registry

from zerotune.trial_lib.messages.foreseen_run import CUDA_PACKAGES, OPERATIONS
from zerotune.trial_lib.plan.simulate import pretended_device
from zerotune.trial_lib.plan.simulate.fake_tensors import FakeTensors
from zerotune.trial_lib.plan.simulate.known_numbers import forget, keep, known_numbers
from zerotune.trial_lib.plan.simulate.logs import OperationLog, bytes_of, class_of
from zerotune.trial_lib.rank.patching import Change, Patch, Table, always, around, instead, with_given

# Attention on the pretended device: the kernel that CUDA would take.

_HALF = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256
_DIMENSIONS = 4  # samples, heads, positions, numbers of a head

_asked: list[str] = []
_MASKED = (
    "The model asks for {}, which skips what padding or a window hides. It is foreseen as torch's attention with a "
    "mask, so memory and time of such batches are rather too high."
)


def attention(
    notes: set[str],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """The attention by a fused kernel; None if CUDA would take the plain formula too.

    Arguments are those of `scaled_dot_product_attention`, of shape (samples, heads, positions, numbers). `notes` gets
    what a plan of the run says of it.
    """
    if not query.dim() == key.dim() == value.dim() == _DIMENSIONS:
        return None
    numbers = query.shape[-1]
    if key.shape[-1] != numbers or query.dtype != key.dtype or query.dtype != value.dtype:
        return None
    kernels = torch.ops.aten
    if attn_mask is None and _is_flash(query, value):
        # The kernel wants heads of a multiple of eight numbers.
        padded = [_padded(each) for each in (query, key, value)]
        factor = scale if scale is not None else 1 / math.sqrt(numbers)
        kernel = kernels._scaled_dot_product_flash_attention
        out: torch.Tensor = kernel(*padded, dropout_p, is_causal, False, scale=factor)[0]
        return out if out.shape[-1] == numbers else out[..., :numbers]
    shares_heads = enable_gqa and key.shape[1] != query.shape[1]
    if shares_heads or query.dtype not in (*_HALF, torch.float32):
        return None
    bias = None
    if attn_mask is not None:
        notes.update(map(_MASKED.format, _asked))
        bias = _as_bias(attn_mask, query.dtype)
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    with_sums = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    made: torch.Tensor = kernels._scaled_dot_product_efficient_attention(
        query, key, value, bias, with_sums, dropout_p, is_causal, scale=scale
    )[0]
    return made


def _is_flash(query: torch.Tensor, value: torch.Tensor) -> bool:
    numbers = query.shape[-1]
    return query.dtype in _HALF and numbers <= _LARGEST_HEAD and value.shape[-1] == numbers


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    missing = -tensor.shape[-1] % 8
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _as_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -math.inf)


def _scaled_dot_product_attention(
    mode: FakeTensors, original: Any, query: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    fused = attention(mode.notes, query, *args, **kwargs) if query.device.type == pretended_device.NAME else None
    return original(query, *args, **kwargs) if fused is None else fused


def _with_notes(own: Any, original: Any, mode: FakeTensors) -> Any:
    return functools.partial(own, mode.notes)


def _own_attention(original: Any, model: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(attn_implementation, str) and attn_implementation.startswith("flash_attention_"):
        _asked.append(attn_implementation)
        attn_implementation = "sdpa"
    return original(model, attn_implementation, *args, **kwargs)


def _flex_attention(original: Any, mode: FakeTensors) -> Any:
    attention_module: Any = sys.modules["torch.nn.attention.flex_attention"]

    @functools.wraps(original)
    def flex_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        score_mod: Any = None,
        block_mask: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        kernel_options: Any = None,
        *,
        return_aux: Any = None,
    ) -> Any:
        """Numbers that `score_mod` has learned get no gradient."""
        if enable_gqa and key.shape[1] != query.shape[1] and not _is_flash(query, value):
            # The efficient kernel, which stands for it then, wants a key for each head.
            key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
        is_partial = block_mask is not None
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=is_partial, scale=scale, enable_gqa=enable_gqa
        )
        of_rows = query.new_empty(query.shape[:-1], dtype=torch.float32)
        if return_aux is not None:
            return out, attention_module.AuxOutput(lse=of_rows, max_scores=of_rows)
        return (out, of_rows) if return_lse else out

    return flex_attention


def _attend(
    notes: set[str],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    query, key, value = (each.transpose(1, 2) for each in (q, k, v))
    out = attention(notes, query, key, value, None, dropout_p, causal, softmax_scale, enable_gqa=True)
    if out is None:
        raise RuntimeError("FlashAttention only supports fp16 and bf16 data type")  # the package's own words
    return out.transpose(1, 2)


def _attend_packed(notes: set[str], qkv: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    query, key, value = qkv.unbind(2)
    return _attend(notes, query, key, value, *args, **kwargs)


def _attend_packed_keys(notes: set[str], q: torch.Tensor, kv: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    key, value = kv.unbind(2)
    return _attend(notes, q, key, value, *args, **kwargs)


def _attend_to_sequences(
    notes: set[str],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    lengths = (cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k))
    forward = torch.ops.aten._flash_attention_forward
    out: torch.Tensor = forward(q, k, v, *lengths, dropout_p, causal, False, scale=softmax_scale)[0]
    return out


# Triton's kernels, those of Liger, and bitsandbytes.

PRODUCTS = {
    "int8_linear_matmul": (0, 1),
    "int8_scaled_mm": (0, 1),
    "int8_mixed_scaled_mm": (0, 2),
    "gemm_4bit": (0, 2),
    "gemv_4bit": (0, 2),
}
"""Operators of bitsandbytes that multiply: positions of the samples and of the weights, or of the weights' shape."""

_WORD = "cuda"


def _launch(
    mode: FakeTensors, original: Any, kernel: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any
) -> None:
    if not warmup:
        _note(mode.operations, kernel, [*args, *kwargs.values()])


def _note(operations: OperationLog, kernel: Any, arguments: list[Any]) -> None:
    """Notes a launch. The kernel reads or writes each of its tensors once, with one FLOP for each number.

    A kernel that goes through a tensor twice does more. Its source would have to be read for that.
    """
    tensors = {id(each): each for each in arguments if isinstance(each, torch.Tensor)}
    if not tensors:
        return
    for each in tensors.values():
        forget(each)
    largest = max(tensors.values(), key=bytes_of)
    moved = float(sum(map(bytes_of, tensors.values())))
    kind = OPERATIONS[class_of(_name(kernel))]
    on_host = largest.device.type != pretended_device.NAME
    operations.work(kind, largest, float(largest.numel()), moved, on_host)


def _name(kernel: Any) -> str:
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return str(getattr(kernel, "__name__", ""))


def _make_subclass(original: Any, mode: FakeTensors) -> Any:
    def make_subclass(cls: Any, data: torch.Tensor, require_grad: bool = False, **more: Any) -> torch.Tensor:
        is_own = issubclass(cls, torch.nn.Parameter) and cls is not torch.nn.Parameter
        if is_own and type(data) is torch.Tensor and data.device.type == "cpu":
            data = mode.parameter(data)
        if not isinstance(data, FakeTensor):
            real: torch.Tensor = original(cls, data, require_grad, **more)
            return real
        made = data.detach().requires_grad_(require_grad)
        made.__class__ = cls if issubclass(cls, FakeTensor) else _both(cls)
        return made

    return staticmethod(make_subclass)


@functools.cache
def _both(cls: type) -> type:
    return type(cls)(cls.__name__, (cls, FakeTensor), _WITHOUT_SHAPE if issubclass(cls, UninitializedParameter) else {})


# A lazy layer's parameter refuses to tell its shape, which the mode has to know. Later it becomes a usual parameter.
_WITHOUT_SHAPE = {"shape": torch.Tensor.shape, "cls_to_become": FakeTensor, "_is_param": True}


def with_pretended_device(code: CodeType) -> CodeType:
    """Each constant `cuda` becomes the pretended device's name. A set of constants gets it besides."""
    return code.replace(co_consts=tuple(map(_replaced, code.co_consts)))


def _replaced(constant: Any) -> Any:
    if isinstance(constant, CodeType):
        return with_pretended_device(constant)
    if constant == _WORD and isinstance(constant, str):
        return pretended_device.NAME
    if isinstance(constant, frozenset) and _WORD in constant:
        return constant | {pretended_device.NAME}
    return tuple(map(_replaced, constant)) if type(constant) is tuple else constant


class _Finder(MetaPathFinder):
    """Finds modules of the packages as Python's own finder does, and changes their code."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in CUDA_PACKAGES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType | None:
        code = super().get_code(fullname)
        return None if code is None else with_pretended_device(code)


def _new_dynamic_size(original: Any, context: Any, **bounds: Any) -> Any:
    return 0 if str(context._op).startswith("bitsandbytes") else original(context, **bounds)


def flops_of(samples: int, weights: int) -> Any:
    """The formula of an operator for `torch.utils.flop_counter`, by the positions of its samples and weights."""

    def flops(*args: Any, **kwargs: Any) -> int:
        """The first number of the weights' shape is the outputs' length."""
        shape = args[weights].shape if isinstance(args[weights], torch.Tensor) else args[weights]
        return 2 * int(math.prod(args[samples].shape)) * int(shape[0])

    return flops


def _add_formulas(module: ModuleType, mode: FakeTensors) -> None:
    for name, places in PRODUCTS.items():
        packet = getattr(torch.ops.bitsandbytes, name, None)
        if packet is not None:
            flop_registry[packet] = flops_of(*places)


def _state_buffer(optimizer: Any, p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros_like(p, dtype=dtype, device=p.device)


# Text that a program generates while it trains.

_SPECIAL = ("pad_token_id", "eos_token_id", "bos_token_id", "decoder_start_token_id")


class _Texts:
    def __init__(self) -> None:
        self._tokens = 0
        self._is_long_enough = False

    def check(self, original: Any, criteria: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        limits = [limit for each in criteria if (limit := getattr(each, "max_length", None)) is not None]
        self._tokens = input_ids.shape[-1]
        self._is_long_enough = any(self._tokens >= limit for limit in limits)
        return original(criteria, input_ids, *args, **kwargs)

    def has_unfinished_sequences(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        ends, self._is_long_enough = self._is_long_enough, False
        return not ends and original(model, *args, **kwargs)

    def generate(self, original: Any, model: Any, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        self._tokens = 0
        found = original(model, inputs, *args, **kwargs)
        token = _plain_token(model, kwargs, args)
        prompt = inputs if inputs is not None else kwargs.get("input_ids")
        if getattr(model.config, "is_encoder_decoder", False):
            # The encoder has read the prompt, and the texts do not repeat it.
            prompt = None
        if isinstance(found, FakeTensor):
            return self._written(found, token, prompt)
        if isinstance(getattr(found, "sequences", None), FakeTensor):
            found.sequences = self._written(found.sequences, token, prompt)
        return found

    def _written(self, texts: torch.Tensor, token: int, prompt: Any) -> torch.Tensor:
        # Texts with known tokens. A search by beams has cut them at a length that it asked.
        if texts.shape[-1] < self._tokens:
            texts = texts.new_empty(*texts.shape[:-1], self._tokens)
        if known_numbers(texts) is None:
            real = torch.full(texts.shape, token, dtype=texts.dtype, device="cpu")
            _copy_prompt(real, prompt)
            keep(texts, real)
        return texts


def _plain_token(model: Any, kwargs: Mapping[str, Any], args: Sequence[Any]) -> int:
    settings = [kwargs.get("generation_config"), *args, getattr(model, "generation_config", None), model.config]
    special: set[int] = set()
    for name in _SPECIAL:
        for value in (kwargs.get(name), *(getattr(each, name, None) for each in settings)):
            special.update(value if isinstance(value, Collection) else () if value is None else (value,))
    middle = (getattr(model.config, "vocab_size", None) or 0) // 2
    return next(token for token in itertools.count(middle) if token not in special)


def _copy_prompt(texts: torch.Tensor, prompt: Any) -> None:
    # Writes a known prompt before the generated tokens. Several texts may continue it.
    known = known_numbers(prompt) if isinstance(prompt, FakeTensor) else prompt
    if not isinstance(known, torch.Tensor) or known.dim() != texts.dim() or known.shape[-1] > texts.shape[-1]:
        return
    of_each, rest = divmod(texts.shape[0], max(1, known.shape[0]))
    if not rest:
        texts[:, : known.shape[-1]] = known.repeat_interleave(of_each, dim=0)


_texts = _Texts()


# What libraries ask of a tensor: whether it is fake, as it is while a program is traced.

_OF_FAKES = ("torch._subclasses", "torch._subclasses.fake_tensor")
_NOT_TRACED = "Libraries take another way if a program is traced (masks of transformers). Torch itself has to know."


class _OfNone(type(FakeTensor)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return False


class _NoTensor(FakeTensor, metaclass=_OfNone):
    """The class as libraries get it. It has no objects."""


def _hide_fakes(module: Any, mode: FakeTensors) -> None:
    def answer(name: str, to_others: Any) -> property:
        def asked(asked_module: Any) -> Any:
            asker = str(sys._getframe(1).f_globals.get("__name__"))
            return vars(asked_module)[name] if asker.startswith(("torch.", "zerotune.")) else to_others

        return property(asked)

    # A property comes before what a module has, and the module's own code does not ask it.
    own = {"FakeTensor": answer("FakeTensor", _NoTensor)}
    if hasattr(module, "is_fake"):
        own["is_fake"] = answer("is_fake", lambda tensor: False)
    module.__class__ = type("Module", (type(module),), own)


# What libraries ask of a computer: the CPU or CUDA.


def _check_arguments(original: Any, arguments: Any) -> None:
    for name in ("use_cpu", "no_cuda"):
        if getattr(arguments, name, False):
            setattr(arguments, name, False)
    original(arguments)


def _init_state(original: Any, state: Any, cpu: bool = False, **kwargs: Any) -> None:
    original(state, cpu=False, **kwargs)


def _code(original: CodeType, mode: FakeTensors) -> CodeType:
    return with_pretended_device(original)


_LAUNCHES = "It computes nothing, and its launch is noted."
_BY_WORD = 'It takes another way if a tensor is on a device of the type "cuda".'
_IS_CUDA = "The program trains on the device that is asked for, not on the CPU."
_UNKNOWN_TEXT = "Nobody knows which tokens a model would choose."
PATCHES: Table = (
    Patch(
        "torch.nn.functional",
        "scaled_dot_product_attention",
        "It is the kernel that CUDA would take.",
        with_given(_scaled_dot_product_attention),
    ),
    *(
        Patch(
            "flash_attn",
            name,
            "It is the kernel that CUDA would take.",
            functools.partial(_with_notes, own),
            may_lack=True,
        )
        for name, own in (
            ("flash_attn_func", _attend),
            ("flash_attn_varlen_func", _attend_to_sequences),
            ("flash_attn_qkvpacked_func", _attend_packed),
            ("flash_attn_kvpacked_func", _attend_packed_keys),
        )
    ),
    Patch(
        "torch.nn.attention.flex_attention",
        "flex_attention",
        "It is compiled for a device.",
        _flex_attention,
        may_lack=True,
    ),
    Patch(
        "transformers.modeling_utils",
        "PreTrainedModel._check_and_adjust_attn_implementation",
        "Torch's attention stands for the kernel that a model asks for.",
        around(_own_attention),
        may_lack=True,
    ),
    *(Change(module, "FakeTensor is_fake", _NOT_TRACED, _hide_fakes) for module in _OF_FAKES),
    Patch(
        "transformers.modeling_attn_mask_utils",
        "_prepare_4d_causal_attention_mask_for_sdpa.__code__",
        _BY_WORD,
        _code,
        may_lack=True,
    ),
    Patch("transformers.integrations.moe", "_can_use_grouped_mm.__code__", _BY_WORD, _code, may_lack=True),
    Patch("triton.runtime.jit", "JITFunction.run", _LAUNCHES, with_given(_launch), may_lack=True),
    Patch("triton.runtime.autotuner", "Autotuner.run Heuristics.run", _LAUNCHES, with_given(_launch), may_lack=True),
    Patch("torch", "Tensor._make_subclass", "It refuses a fake tensor.", _make_subclass),
    Change(
        "sys",
        f"code of {', '.join(CUDA_PACKAGES)}",
        "They choose sizes and kernels by the word `cuda`.",
        # After the finder that calls back after an import, which asks the others.
        lambda module, mode: module.meta_path.insert(module.meta_path.index(PathFinder), _Finder()),
    ),
    Change("bitsandbytes._ops", "products", "They have no formula of their FLOPs.", _add_formulas),
    Patch(
        "torch._library.fake_impl",
        "FakeImplCtx.new_dynamic_size",
        "Few columns have an outlier, as bitsandbytes counts them.",
        around(_new_dynamic_size),
    ),
    Patch(
        "bitsandbytes.optim.optimizer",
        "Optimizer8bit.get_state_buffer",
        "CUDA moves the pages of a paged optimizer to the host when the device is full. They are counted on the "
        "device.",
        instead(_state_buffer),
    ),
    Patch(
        "transformers.generation.stopping_criteria",
        "StoppingCriteriaList.__call__",
        _UNKNOWN_TEXT,
        around(_texts.check),
    ),
    # Transformers has it since 4.38.
    Patch(
        "transformers.generation.utils",
        "GenerationMixin._has_unfinished_sequences",
        _UNKNOWN_TEXT,
        around(_texts.has_unfinished_sequences),
        may_lack=True,
    ),
    Patch("transformers.generation.utils", "GenerationMixin.generate", _UNKNOWN_TEXT, around(_texts.generate)),
    Change("os", "ACCELERATE_USE_CPU", _IS_CUDA, lambda module, mode: os.environ.pop("ACCELERATE_USE_CPU", None)),
    Patch("transformers.training_args", "TrainingArguments.__post_init__", _IS_CUDA, around(_check_arguments)),
    Patch("accelerate.state", "PartialState.__init__", _IS_CUDA, around(_init_state)),
    Patch("accelerate.utils.random", "synchronize_rng_states", "All ranks have the states of rank 0.", always(None)),
    *(
        Patch(
            f"{package}.accelerators.cuda",
            "CUDAAccelerator.setup_device",
            "It would refuse a device of another name, and set up kernels.",
            always(None),
        )
        for package in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric")
    ),
)
