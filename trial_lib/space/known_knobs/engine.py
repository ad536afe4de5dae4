"""Settings of the engine itself: Python's garbage collector, and the passes of DeepCompile."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trial_lib.command.switches import path_of
from trial_lib.space.effects import Effect, KnownKnob, Surroundings
from trial_lib.wire.turned import COMPILE

DEEPCOMPILE = "compile.deepcompile"
_NOT_COMPILED = "DeepCompile acts in code that calls engine.compile(), and yours does not"


def _is_compiled(here: Surroundings) -> bool:
    return here.compiles_engine


def _can_be_compiled(here: Surroundings) -> bool:
    return COMPILE in here.turnable


def _of_deepcompile(key: str, **takes: Any) -> dict[str, KnownKnob]:
    """Returns a setting that DeepCompile reads (arXiv 2504.09983)."""
    when: Mapping[str, tuple[Any, ...]] = {} if key == "deepcompile" else {DEEPCOMPILE: (True,)}
    source, stages = f"../compile/config.py {key}, engine.py get_deepcompile_backend", (1, 2, 3)
    # Either the code compiles the engine, or ZeroTune turns that on.
    by_code = Effect(source, stages, ("cuda",), when=when, holds=_is_compiled, otherwise=_NOT_COMPILED)
    by_zerotune = replace(by_code, when={**when, path_of(COMPILE): (True,)}, holds=_can_be_compiled)
    known: dict[str, Any] = {"kind": "switch", "default": False, "is_coarse": True, **takes}
    return {f"compile.{key}": KnownKnob(effects=(by_code, by_zerotune), **known)}


ENGINE: dict[str, KnownKnob] = {
    # Cycles of objects then stay for the whole training. A trial is too short to see how much memory they come to.
    "disable_python_gc": KnownKnob("switch", (Effect("engine.py _configure_python_gc"),), since="0.19.8", word="no-gc"),
    **_of_deepcompile("deepcompile", since="0.16.6"),
    **_of_deepcompile("free_activation", since="0.16.6"),
    **_of_deepcompile("offload_activation", since="0.16.6"),
    **_of_deepcompile("offload_opt_states", since="0.16.6"),
    **_of_deepcompile("offload_parameters", since="0.16.6"),
    **_of_deepcompile("double_buffer", since="0.16.6", default=True),
    **_of_deepcompile("symmetric_memory", since="0.16.6"),
}
