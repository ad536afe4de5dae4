"""Ends the first run of a program where it needs an op of DeepSpeed's that is not built.

The driver then builds the op while the trial has no slots, and runs the program again. The op of the collectives is
loaded with the process group. A program with a group may never have an engine, so this op is needed with the engine.
"""

from pathlib import Path
from types import ModuleType
from typing import Any

from trial_lib.intercept.post_import import when_imported
from trial_lib.wire.build_times import has_work

_OF_THE_GROUP = "ShareMemCommBuilder"


class OpNotBuiltError(BaseException):
    """An op is not built. The message is the name of its builder. No program handles this as an error of its own."""


class _Loads:
    """The loads of ops in this process.

    Attributes:
        now: the builder of the op that is being loaded. None for any other extension, which may be built.
        has_left_out: whether the process group was made without its op.
        needs_all: whether an engine is being made, which needs every op.
    """

    now: str | None = None
    has_left_out = False
    needs_all = False


def end_at_unbuilt_ops() -> None:
    """Ends this rank, from now on, where DeepSpeed would compile an op."""

    def follow_builds(module: ModuleType) -> None:
        run = module._run_ninja_build

        def run_if_built(build_directory: str, *arguments: Any, **options: Any) -> None:
            """Replaces `torch.utils.cpp_extension._run_ninja_build`, which torch also calls for built ops."""
            if _Loads.now is not None and has_work(Path(build_directory)):
                raise OpNotBuiltError(_Loads.now)
            run(build_directory, *arguments, **options)

        module._run_ninja_build = run_if_built  # type: ignore[attr-defined]

    def follow_loads(module: ModuleType) -> None:
        load = module.OpBuilder.jit_load

        def jit_load(builder: Any, *arguments: Any, **options: Any) -> Any:
            """Replaces `OpBuilder.jit_load`."""
            _Loads.now = type(builder).__name__
            try:
                return load(builder, *arguments, **options)
            except OpNotBuiltError:
                if _Loads.needs_all or _Loads.now != _OF_THE_GROUP:
                    raise
                # DeepSpeed then sums by gloo.
                _Loads.has_left_out = True
                return None
            finally:
                _Loads.now = None

        module.OpBuilder.jit_load = jit_load

    when_imported("torch.utils.cpp_extension", follow_builds)
    when_imported("deepspeed.ops.op_builder.builder", follow_loads)


def engine_begins() -> None:
    """Ends this rank if an op was left out that its engine needs."""
    _Loads.needs_all = True
    if _Loads.has_left_out:
        raise OpNotBuiltError(_OF_THE_GROUP)
