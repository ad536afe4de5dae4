"""The record of numbers that code asks of fake tensors, and the answers to its checks."""

import dis
import functools
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from zerotune.trial_lib.messages.foreseen_run import Ask
from zerotune.trial_lib.plan.simulate import known_numbers
from zerotune.trial_lib.rank.patching import Patch, Table, around, with_given

# Answers for code that asks a fake tensor for a number: a table of known askers, and a default for all others.

FINITE = 1.0
"""The default for a floating-point number: neither zero nor infinite."""


@dataclass(frozen=True)
class KnownAsker:
    """One place in a library that asks for a number."""

    path: str  # the end of its file's path
    function: str  # its name; empty for every function of the file
    answer: Any  # the value that a healthy training gives there
    why: str  # the meaning of the number


KNOWN: tuple[KnownAsker, ...] = (
    KnownAsker("deepspeed/runtime/utils.py", "has_overflow", False, "whether gradients overflow"),
    KnownAsker("deepspeed/runtime/utils.py", "check", False, "whether gradients overflow"),
    KnownAsker("deepspeed/runtime/utils.py", "_has_inf_or_nan", FINITE, "the sum of a gradient"),
    KnownAsker("deepspeed/runtime/utils.py", "", FINITE, "a norm"),
    KnownAsker("deepspeed/runtime/zero/stage3.py", "has_overflow", False, "whether gradients overflow"),
    KnownAsker("deepspeed/runtime/zero/stage3.py", "", FINITE, "a norm, or a sum of gradients"),
    KnownAsker("deepspeed/runtime/zero/stage_1_and_2.py", "has_overflow", False, "whether gradients overflow"),
    KnownAsker("deepspeed/runtime/zero/stage_1_and_2.py", "", FINITE, "a norm, or a sum of gradients"),
    KnownAsker("deepspeed/runtime/zero/partition_parameters.py", "", False, "whether a rank has modified parameters"),
    KnownAsker("deepspeed/runtime/bf16_optimizer.py", "", FINITE, "a norm"),
    KnownAsker("deepspeed/runtime/fp16/", "", FINITE, "a norm, a sum of gradients or a loss scale"),
    KnownAsker("deepspeed/runtime/engine.py", "", FINITE, "a loss or a norm"),
    KnownAsker("deepspeed/runtime/pipe/engine.py", "", FINITE, "a loss, or the shape that another stage sends"),
    KnownAsker("deepspeed/runtime/tensor_parallel/tp_manager.py", "", True, "whether ranks have the same batch"),
    KnownAsker("deepspeed/runtime/zero/", "", FINITE, "a norm, a sum of gradients or whether they overflow"),
    KnownAsker("deepspeed/module_inject/", "", True, "whether ranks have the same batch"),
    KnownAsker("deepspeed/moe/sharded_moe.py", "", FINITE, "a loss, or the capacity of an expert"),
    KnownAsker("transformers/trainer.py", "_run_epoch", False, "whether a loss is not a number, for the log"),
    KnownAsker("transformers/trainer.py", "_inner_training_loop", False, "likewise, before transformers 5"),
    KnownAsker("transformers/trainer.py", "", FINITE, "a loss or a norm, for the log"),
    KnownAsker("transformers/trainer_callback.py", "", FINITE, "a metric"),
    KnownAsker("transformers/trainer_pt_utils.py", "", FINITE, "a metric"),
    KnownAsker("transformers/masking_utils.py", "", True, "whether a mask hides nothing"),
    KnownAsker("transformers/modeling_attn_mask_utils.py", "", True, "whether a mask hides nothing"),
    KnownAsker("transformers/modeling_flash_attention_utils.py", "", False, "whether a batch is packed"),
    *(
        KnownAsker(f"transformers/models/{model}/", "get_image_features", True, "which images are more than padding")
        for model in ("idefics2", "idefics3", "modernvbert", "smolvlm", "ultravbert")
    ),
    KnownAsker("transformers/loss/", "generalized_box_iou", True, "whether boxes have their corners in order"),
    KnownAsker("transformers/initialization.py", "", False, "whether numbers lie outside their range"),
    KnownAsker("transformers/generation/utils.py", "_beam_search", True, "whether a beam goes on"),
    KnownAsker("transformers/generation/", "", False, "whether all texts have ended"),
    KnownAsker("accelerate/utils/deepspeed.py", "", FINITE, "a norm, for the log"),
    KnownAsker("accelerate/accelerator.py", "", FINITE, "a norm, or the flag of a trigger"),
    KnownAsker("accelerate/optimizer.py", "", FINITE, "a loss scale"),
    KnownAsker("accelerate/utils/operations.py", "", FINITE, "a size that ranks agree on"),
    KnownAsker("peft/", "", FINITE, "a scale"),
    KnownAsker("trl/", "", FINITE, "a metric, for the log"),
    KnownAsker("liger_kernel/", "", True, "whether a loss has no factor, and whether its labels are in range"),
    KnownAsker("lightning/", "", FINITE, "a metric, or whether it is finite"),
    KnownAsker("pytorch_lightning/", "", FINITE, "a metric, or whether it is finite"),
    KnownAsker("torch/nn/modules/_functions.py", "forward", True, "which ranks have samples for a shared norm"),
    KnownAsker("torch/nn/utils/clip_grad.py", "", FINITE, "a norm"),
    KnownAsker("torch/amp/grad_scaler.py", "", 0.0, "how many gradients are infinite"),
    KnownAsker("torch/optim/", "", FINITE, "a count of steps"),
)
"""The asks of libraries. A row of a file without a function stands for all others of its file, so it comes last."""


def known(path: str, function: str) -> KnownAsker | None:
    """The first row for an asker."""
    for row in KNOWN:
        is_here = f"/{row.path}" in path if row.path.endswith("/") else path.endswith(f"/{row.path}")
        if is_here and row.function in ("", function):
            return row
    return None


LIKELY = "_foreseen_likely"
"""Marks a tensor by which a program checks its numbers. An unknown asker of it gets yes."""

_OWN_CODE = "/trial_lib/"
# Instructions between the one that asks and the jump by its answer. Versions of Python differ.
_HAND_ON = "CACHE CALL CALL_FUNCTION CALL_METHOD CALL_KW CALL_FUNCTION_EX PRECALL TO_BOOL EXTENDED_ARG"
_OWN = ("/trial_lib/plan/", "/trial_lib/rank/", "/torch/")


class CannotForeseeError(Exception):
    """The program does something that fake tensors cannot. The message is a sentence."""


class Asks:
    """Answers, and counts who asked."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str, bool]] = Counter()

    def answer(self, question: str, dtype: torch.dtype, is_likely: bool = False) -> Any:
        """Invents a number in place of the unknown one. `is_likely` says that an unknown asker gets yes."""
        frame = _asker()
        row = _row_of(frame)
        default: Any = True if question == "equal" else FINITE if dtype.is_floating_point else 0
        answer: Any = default if row is None else row.answer
        if row is None or row.answer is FINITE:
            passing = _passing_answer(frame) if dtype == torch.bool else None
            if passing is not None:
                answer = passing
            elif is_likely:
                answer = True
        if question == "item":
            answer = _of_type(answer, dtype)
        self._count(frame, question, answer, row is not None)
        return answer

    def chooses_all(self) -> bool:
        """Whether a known asker chooses by an unknown mask, which chooses all in a healthy training."""
        frame = _asker()
        row = _row_of(frame)
        if row is None or row.answer is not True:
            return False
        self._count(frame, "mask", True, True)
        return True

    def choice(self, question: str, among: int) -> Callable[[], None] | None:
        """What counts a use of a choice, each of which is taken equally often; None for a known asker, which has its
        own answers.
        """
        frame = _asker()
        if _row_of(frame) is not None:
            return None
        row = _named(frame), question, f"each of {among} equally often", False

        def count() -> None:
            self._counts[row] += 1

        return count

    def _count(self, frame: FrameType, question: str, answer: Any, is_known: bool) -> None:
        self._counts[_named(frame), question, str(answer), is_known] += 1

    def record(self) -> tuple[Ask, ...]:
        """The asks so far, those of unknown askers first."""
        rows = sorted(self._counts.items(), key=lambda row: (row[0][3], -row[1]))
        return tuple(
            Ask(asker=asker, question=question, answer=answer, is_known=is_known, count=count)
            for (asker, question, answer, is_known), count in rows
        )


def _of_type(answer: Any, dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        # A number that means "finite" is no answer to a yes or no.
        return answer is True
    if dtype.is_complex:
        return complex(answer)
    return float(answer) if dtype.is_floating_point else int(answer)


def _named(asker: FrameType) -> str:
    return f"{asker.f_code.co_name} ({_shown(asker.f_code.co_filename)}:{asker.f_lineno})"


def _row_of(frame: FrameType) -> KnownAsker | None:
    return known(frame.f_code.co_filename, frame.f_code.co_name)


def _asker() -> FrameType:
    frame: FrameType | None = sys._getframe(2)
    last = frame
    while frame is not None:
        last = frame
        name = frame.f_code.co_filename
        if "/torch/" in name and _row_of(frame) is not None:
            return frame
        if not name.startswith("<") and not any(part in name for part in _OWN):
            return frame
        frame = frame.f_back
    assert last is not None
    return last


def _passing_answer(asker: FrameType) -> bool | None:
    """The yes or no by which code raises no error, because a healthy training passes its checks.

    None if neither answer leads to an error at once, or if both do.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and _OWN_CODE in frame.f_code.co_filename:
        frame = frame.f_back
    # Torch may ask in the asker's name, as `torch._assert` does.
    for each in (frame, asker):
        found = None if each is None else _without_error(each.f_code, each.f_lasti)
        if found is not None:
            return found
    return None


@functools.cache
def _without_error(code: CodeType, offset: int) -> bool | None:
    # The truth of the value at an instruction by which the code jumps past an error; None without one.
    instructions = list(dis.get_instructions(code))
    places = {each.offset: place for place, each in enumerate(instructions)}
    place = places.get(offset)
    while place is not None and place < len(instructions) and instructions[place].opname in _HAND_ON.split():
        place += 1
    if place is None or place + 1 >= len(instructions):
        return None
    jump = instructions[place]
    if not jump.opname.startswith("POP_JUMP") or not jump.opname.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    known: dict[int, bool] = {}
    fails_there, fails_here = (_raises(instructions, places, at, known) for at in (places[jump.argval], place + 1))
    if fails_there == fails_here:
        return None
    return fails_here == jump.opname.endswith("IF_TRUE")


def _raises(
    instructions: Sequence[dis.Instruction], places: Mapping[int, int], at: int, known: dict[int, bool]
) -> bool:
    """Whether code comes to a `raise` on each of its ways, and goes back on none. `known` has the answers so far."""
    for place in range(at, len(instructions)):
        if place in known:
            return known[place]
        each = instructions[place]
        if each.opname == "RAISE_VARARGS":
            return True
        if each.opname.startswith(("RETURN", "YIELD", "FOR_ITER", "SEND")):
            return False
        if "JUMP" in each.opname:
            target = places.get(each.argval, 0)
            found = target > place and _raises(instructions, places, target, known)
            if found and "_IF_" in each.opname:
                found = _raises(instructions, places, place + 1, known)
            known[place] = found
            return found
    return False


def _shown(path: str) -> str:
    for mark in ("/site-packages/", "/dist-packages/"):
        if mark in path:
            return path.split(mark, 1)[1]
    return path


# Numbers of a tensor that programs ask in ways of their own.

# What `isfinite` or `isnan` has made, until somebody writes into it: the version of the tensor, and its answer.
_ALIKE = "_foreseen_alike"
# The answers of a healthy training. Masked scores have infinite numbers in a real run, and none here.
_ANSWERS = {"isfinite": True, "isnan": False, "isinf": False, "isposinf": False, "isneginf": False}
# Longer masks choose nothing.
_MOST_ALIKE = 2**20
_MAY_HAVE_FAKES = (FakeTensor, list, tuple)


def _format(original: Any, tensor: torch.Tensor, text: str) -> str:
    is_number = isinstance(tensor, FakeTensor) and tensor.dim() == 0 and text
    return format(tensor.item(), text) if is_number else str(original(tensor, text))


def _first_scale(original: Any, scaler: Any) -> float:
    return float(scaler._init_scale) if scaler.is_enabled() else 1.0


def _answering(answer: bool, original: Any, *args: Any, **kwargs: Any) -> Any:
    return _as_alike(original(*args, **kwargs), answer)


def _all(original: Any, *args: Any, **kwargs: Any) -> Any:
    found = original(*args, **kwargs)
    asked = args[0] if args else kwargs.get("input")
    version, answer = getattr(asked, _ALIKE, (None, None))
    if version is None:
        if _is_open(found):
            setattr(found, LIKELY, True)
    elif version == _version(asked):
        return _as_alike(found, answer)
    return found


def _of_numbers(original: Any, *args: Any, **kwargs: Any) -> Any:
    if args:
        args = (_numbers_of(args[0]), *args[1:])
    elif "data" in kwargs:
        kwargs["data"] = _numbers_of(kwargs["data"])
    return original(*args, **kwargs)


def _new_of_numbers(original: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return _of_numbers(functools.partial(original, tensor), *args, **kwargs)


def _numbers_of(data: Any) -> Any:
    # A list with numbers in the place of fake tensors, which torch would read as memory of a device.
    if type(data) not in (list, tuple) or not any(isinstance(each, _MAY_HAVE_FAKES) for each in data):
        return data
    return [_number_of(each) for each in data]


def _number_of(element: Any) -> Any:
    if isinstance(element, FakeTensor) and element.numel() == 1:
        # Torch takes the type of the whole from its numbers.
        return torch.full((), element.item(), dtype=element.dtype, device="cpu")
    return _numbers_of(element)


def _as_alike(found: Any, answer: Any) -> Any:
    if _is_open(found):
        setattr(found, _ALIKE, (_version(found), answer))
        if found.numel() <= _MOST_ALIKE:
            known_numbers.keep(found, torch.full(found.shape, answer, dtype=torch.bool, device="cpu"))
    return found


def _is_open(found: Any) -> bool:
    return isinstance(found, FakeTensor) and not known_numbers.is_known(found)


def _version(tensor: Any) -> int:
    return int(tensor._version) if isinstance(tensor, torch.Tensor) and not tensor.is_inference() else -1


def _numpy(mode: Any, original: Any, tensor: torch.Tensor, *, force: bool = False) -> Any:
    if not isinstance(tensor, FakeTensor):
        return original(tensor, force=force)
    known = known_numbers.known_numbers(tensor)
    known_numbers.used(known)
    if known is None:
        value = mode.asks.answer("numpy", tensor.dtype)
        known = torch.full(tensor.shape, value, dtype=tensor.dtype, device="cpu")
    return original(known.detach(), force=force)


# Experts that a router chooses.

# The best of more are tokens of a vocabulary, or places in an image.
_MOST_EXPERTS = 2**10
# More choices are no routing. A softmax looks for the largest of as many rows.
_MOST_CHOICES = 2**20
# Functions of torch that choose the best along a dimension, and the place of that dimension among their arguments.
_CHOICES = {"topk": 2, "argmax": 1, "max": 1}


def _choosing(name: str, original: Any, mode: Any) -> Any:
    default = -1 if name == "topk" else None

    @functools.wraps(original)
    def choose(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        chosen = found[1] if isinstance(found, tuple) else found
        if isinstance(chosen, FakeTensor) and not known_numbers.is_known(chosen) and args:
            place = _CHOICES[name]
            dimension = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else default))
            if _may_route(args[0], chosen, dimension):
                note = mode.asks.choice(name, args[0].shape[-1])
                if note is not None:
                    # Each choice goes on after those of the token before it.
                    turns = torch.arange(chosen.numel(), dtype=chosen.dtype, device="cpu") % args[0].shape[-1]
                    known_numbers.invent(chosen, turns.reshape(chosen.shape), note)
        return found

    return choose


def _may_route(scores: torch.Tensor, chosen: torch.Tensor, dimension: Any) -> bool:
    if not isinstance(dimension, int) or scores.dim() <= 1 or dimension not in (-1, scores.dim() - 1):
        return False
    return scores.shape[-1] <= _MOST_EXPERTS and chosen.numel() <= _MOST_CHOICES


_HEALTHY = "The answer of a healthy training."
_OF_ONE_NUMBER = "A list may have fake tensors of one number, which torch would read as memory of a device."
PATCHES: Table = (
    Patch(
        "torch._subclasses.fake_tensor",
        "FakeTensor.__format__",
        "A number is shown as the answer to it.",
        around(_format),
    ),
    *(
        Patch("torch", f"{name} Tensor.{name}", _HEALTHY, around(functools.partial(_answering, answer)))
        for name, answer in _ANSWERS.items()
    ),
    Patch("torch", "all Tensor.all", _HEALTHY, around(_all)),
    # By which `torch.distributions` checks its parameters.
    Patch("torch", "_is_all_true", _HEALTHY, around(_all), may_lack=True),
    Patch("torch", "tensor as_tensor asarray", _OF_ONE_NUMBER, around(_of_numbers)),
    Patch(
        "torch", "amp.GradScaler.get_scale", "A training goes on with the scale it begins with.", around(_first_scale)
    ),
    Patch("torch", "Tensor.new_tensor", _OF_ONE_NUMBER, around(_new_of_numbers)),
    Patch("torch", "Tensor.numpy", "Numbers that nobody knows are invented.", with_given(_numpy)),
    *(
        Patch(
            "torch",
            f"{name} Tensor.{name}",
            "A router chooses each expert equally often.",
            functools.partial(_choosing, name),
        )
        for name in _CHOICES
    ),
)
