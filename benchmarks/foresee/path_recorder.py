"""Notes the operators of a program's passes, where it really runs on a CPU and where it is foreseen. Runs in both.

    python path_recorder.py train.py --deepspeed_config ds.json

It runs a script, and notes the operators of the first passes through a DeepSpeed engine. If there is a `path.json`, its
path is that of the real run. Then another path ends the program, with the first difference.

Attention, RMS norm and dropout have other kernels on a CPU than on CUDA. So what they are given is noted, and in both
runs they return zeros. No path may depend on such numbers. Only the flash kernel of attention is on both: without a
mask, in 16 bits. It is really called, forward and backward. A CPU has it neither with dropout nor for shared heads.
"""

import contextlib
import functools
import importlib
import json
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FILE = Path("path.json")
PASSES = 2
# They have no kernel, or move what is in its place already on a CPU.
_SKIPPED = {"detach", "alias", "lift_fresh", "_pin_memory", "is_pinned"}
# Their statistics have 32 bits on CUDA, and the bits of their input on a CPU.
_NORMS = {"native_layer_norm_backward", "native_group_norm_backward"}
# The same kernel has another name on a CPU, and other arguments behind these: what goes in, and what came out.
_FLASH = "_scaled_dot_product_flash_attention"
_FLASH_TENSORS, _CAUSAL = {"forward": 3, "backward": 5}, 4
# What a foreseen run takes for the one that asks for a number is code of a file.
_NO_FILE = "<noting>"
_paths: dict[str, list[str]] = {}
_places: dict[str, list[str]] = {}


def _said(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return "" if isinstance(value, torch.device) else str(value)


def _place() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and (
        "/torch/" in frame.f_code.co_filename or frame.f_code.co_filename in (__file__, _NO_FILE)
    ):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


class _Noting(TorchDispatchMode):
    def __init__(self, part: str) -> None:
        super().__init__()
        self.calls = _paths.setdefault(part, [])
        # Of the code that calls each, which a difference names.
        self.places = _places.setdefault(part, [])
        self.is_inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_move = func._opname == "_to_copy" and out.dtype == args[0].dtype
        if func.namespace == "aten" and not (func._opname in _SKIPPED or is_move or self.is_inside):
            name, given = func._opname, tree_leaves(args)
            if name.startswith(_FLASH):
                part = "backward" if name.endswith("backward") else "forward"
                is_causal = part == "forward" and len(given) > _CAUSAL and given[_CAUSAL]
                name, given = f"flash attention, {part}", [*given[: _FLASH_TENSORS[part]], "causal" * bool(is_causal)]
            said = [
                str(list(each.shape)) if name in _NORMS and isinstance(each, torch.Tensor) else _said(each)
                for each in given
            ]
            self.calls.append(" ".join([name, *filter(None, said)]))
            self.places.append(_place())
        return out

    __torch_dispatch__.__code__ = __torch_dispatch__.__code__.replace(co_filename=_NO_FILE)


_modes: list[_Noting] = []


@contextlib.contextmanager
def noting(part: str, only: str = "") -> Iterator[None]:
    """Notes the operators of a part of the program, or those with a word. A part within another one belongs to that."""
    if _modes:
        yield
        return
    mode = _Noting(part)
    _modes.append(mode)
    try:
        with mode:
            yield
    finally:
        _modes.pop()
        kept = [index for index, call in enumerate(mode.calls) if only in call]
        for noted in (mode.calls, mode.places):
            noted[:] = [noted[index] for index in kept]


class _Zeros(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: Any, *inputs: Any) -> torch.Tensor:
        ctx.save_for_backward(*inputs)
        return inputs[0].new_zeros(shape)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return None, *map(torch.zeros_like, ctx.saved_tensors)


def _in_place_of(original: Any, shape_of: Callable[..., Any], names: str) -> Any:
    @functools.wraps(original)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not _modes:
            return original(*args, **kwargs)
        given = {**dict(zip(names.split(), args, strict=False)), **kwargs}
        (mode,) = _modes
        mode.places.append(_place())
        # What has its default may be left out.
        said = (f"{name}={_said(given[name])}" for name in names.split() if not _is_plain(given.get(name)))
        mode.calls.append(f"{original.__name__} {' '.join(said)}")
        if original.__name__ == "scaled_dot_product_attention" and _is_flash(given):
            return original(*args, **kwargs)
        tensors = [each for each in given.values() if isinstance(each, torch.Tensor) and each.is_floating_point()]
        mode.is_inside = True
        try:
            function: Any = _Zeros
            return function.apply(shape_of(given), *tensors)
        finally:
            mode.is_inside = False

    return kernel


def _is_flash(given: Any) -> bool:
    # Whether both CUDA and a CPU take the flash kernel.
    query, key, value = (given[name] for name in ("query", "key", "value"))
    return (
        query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[:2] == key.shape[:2]
        and query.shape[-1] == value.shape[-1]
        and not query.shape[-1] % 8
        and all(_is_plain(given.get(name)) for name in ("attn_mask", "dropout_p"))
    )


def _is_plain(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) and not value


def _like_first(given: Any) -> Any:
    return next(iter(given.values())).shape


def replace_kernels() -> None:
    """Replaces the kernels that a CPU has not."""
    functional = torch.nn.functional
    functional.scaled_dot_product_attention = _in_place_of(
        functional.scaled_dot_product_attention,
        lambda given: (*given["query"].shape[:-1], given["value"].shape[-1]),
        "query key value attn_mask dropout_p is_causal",
    )
    functional.dropout = _in_place_of(functional.dropout, _like_first, "input p training")
    torch.rms_norm = _in_place_of(torch.rms_norm, _like_first, "input normalized_shape weight")


def finish() -> None:
    """Compares the path with that of the real run, or writes it and ends the process."""
    if not FILE.exists():
        FILE.write_text(json.dumps(_paths))
        sys.stdout.flush()
        os._exit(0)
    expected = json.loads(FILE.read_text())
    assert list(_paths) == list(expected), f"parts {list(_paths)} for {list(expected)}"
    different = [text for part in expected if (text := _difference(part, _paths[part], expected[part]))]
    assert not different, " | ".join(different)
    print(f"{sum(map(len, expected.values()))} operators are those of a real run")


def _difference(part: str, mine: list[str], real: list[str]) -> str:
    for index in range(max(len(mine), len(real))):
        pair = [path[index] if index < len(path) else "nothing" for path in (mine, real)]
        if pair[0] != pair[1]:
            before = real[index - 1] if index else "the begin"
            place = _places[part][index] if index < len(mine) else "the end"
            said = f"is `{pair[0]}` at {place}, and really `{pair[1]}`"
            return f"{part}: operator {index} of {len(real)}, after `{before}`, {said}"
    return ""


def main() -> None:
    """Runs the script, and ends or compares after its first passes."""
    import deepspeed

    replace_kernels()
    # A foreseen run leaves out that ranks compare what they gather.
    coordinator: Any = importlib.import_module("deepspeed.runtime.zero.partitioned_param_coordinator")
    coordinator.assert_ints_same_as_other_ranks = lambda ints: None
    engine: Any = deepspeed.DeepSpeedEngine
    forward, backward = engine.forward, torch.Tensor.backward
    done = 0

    @functools.wraps(forward)
    def noted_forward(*args: Any, **kwargs: Any) -> Any:
        if not done and args[0].global_steps == 0:
            # A foreseen run leaves out all micro-batches of the first step but the last.
            args[0].micro_steps = 0
        with noting(f"forward {done}") if done < PASSES else contextlib.nullcontext():
            return forward(*args, **kwargs)

    @functools.wraps(backward)
    def noted_backward(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        with noting(f"backward {done}") if done < PASSES else contextlib.nullcontext():
            found = backward(*args, **kwargs)
        done += 1
        if done == PASSES:
            finish()
        return found

    engine.forward, torch.Tensor.backward = noted_forward, noted_backward  # type: ignore[method-assign]
    # A launcher may put an option before the script.
    script = next(word for word in sys.argv[1:] if not word.startswith("-"))
    sys.argv = [script, *(word for word in sys.argv[1:] if word != script)]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
