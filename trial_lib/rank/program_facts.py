"""Facts about the user's program that a rank collects while it runs."""

import argparse
import difflib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from zerotune.trial_lib.deepspeed_config.overrides import replicas_of, sequence_parallel_size
from zerotune.trial_lib.messages.measurement import Arrival, BatchSizes, ProgramProfile
from zerotune.trial_lib.messages.turned import CHECKPOINTING, COMPILE, FUSED, OPTIMIZER_OPTION
from zerotune.trial_lib.rank import torch_functions
from zerotune.trial_lib.rank.batch_source import (
    Parsers,
    options_read,
    parsers_used,
    stage_repeated,
    values_read,
    with_underscores,
)
from zerotune.trial_lib.rank.tensor_parallel import tensor_parallel_size

# Values of options that the program's own parser would refuse, found without another run

# Options that the parser itself has.
_HELP = ("-h", "--help")


def refused_options(varied: Mapping[str, Sequence[Any]], parsers: Parsers) -> dict[str, str]:
    """Why the program would refuse options or their values: a clause for each option, by its name.

    Of the values to try, None stays as typed, and a boolean has no word of its own. A parser comes with whether it
    refuses options that it does not have.
    """
    found = {}
    for name, values in varied.items():
        reasons = [
            next(filter(None, (_refusal_of(parser, action, name, value) for value in values)), "")
            for parser, action in _actions_of(name, parsers)
        ]
        reason = _unknown(name, parsers) if not reasons else "" if "" in reasons else reasons[0]
        if reason:
            found[name] = reason
    return found


def _actions_of(name: str, parsers: Parsers) -> Iterator[tuple[argparse.ArgumentParser, argparse.Action]]:
    # The actions that an option stands for. A parser may take its beginning, or have it typed otherwise.
    as_typed = with_underscores if _is_typed(name) else str
    for parser, _ in parsers:
        whole = [each for each in parser._actions if as_typed(name) in map(as_typed, each.option_strings)]
        begun = [each for each in parser._actions if any(known.startswith(name) for known in each.option_strings)]
        # As in argparse: an option counts before one that only begins so.
        yield from ((parser, action) for action in whole or begun * parser.allow_abbrev)


def _is_typed(name: str) -> bool:
    return any(with_underscores(word.partition("=")[0]) == with_underscores(name) for word in sys.argv[1:])


def _unknown(name: str, parsers: Parsers) -> str:
    # Why a program would refuse an option that none of its parsers has; empty if it may read it otherwise.
    if not parsers or not all(is_strict for _, is_strict in parsers):
        return ""
    spellings = [each for parser, _ in parsers for action in parser._actions for each in action.option_strings]
    known = {each.lstrip("-"): each for each in spellings if each not in _HELP}
    near = difflib.get_close_matches(name.lstrip("-"), known, n=1)
    return f"your program has no option {name}" + (f", and {known[near[0]]} is the nearest" if near else "")


def _refusal_of(parser: argparse.ArgumentParser, action: argparse.Action, name: str, value: Any) -> str:
    takes_none, takes_one = action.nargs in (0, "?", "*"), action.nargs != 0
    if value is None or value is False:
        return ""
    if value is True:
        # If it is typed with a word, the word is changed.
        return "" if takes_none or _is_typed(name) else f"{name} needs a word behind it, such as 'true'"
    if not takes_one:
        return f"{name} takes no word behind it, and {value} is one"
    if isinstance(action.type, argparse.FileType):
        # It would open the file.
        return ""
    try:
        parser._get_values(action, [str(value)])
    except argparse.ArgumentError as error:
        return f"your program refuses a value of {name}: {error}"
    except Exception:  # noqa: BLE001 - a type of the user's own, which decides when the program runs
        return ""
    return ""


# Torch has others in a fused form too.
_ADAMS = ("torch.optim.adam.Adam", "torch.optim.adamw.AdamW")


class ProgramFacts:
    """Collects the findings about the program while it runs. `found` has them so far."""

    def __init__(self, **found: Any) -> None:
        self.found = ProgramProfile(**found)

    def note(self, **found: Any) -> None:
        self.found = replace(self.found, **found)

    def note_config(self, config: dict[str, Any]) -> None:
        """Keeps a copy of the configuration, if it is the first that the program has passed."""
        if self.found.ds_config is None:
            # A search cannot use values that JSON cannot hold, such as a dtype or a path.
            self.note(ds_config=json.loads(json.dumps(config, default=str)))

    def note_trained_config(self, config: dict[str, Any]) -> None:
        """Keeps a copy of the configuration of the engine that trains, whatever the program has passed before."""
        self.note(ds_config=None)
        self.note_config(config)

    def note_varied(self, options: Mapping[str, Sequence[Any]]) -> None:
        self.note(switches=values_read(options), refused_options=refused_options(options, parsers_used))

    def note_typed_engine(self, engine: Any, varied: Mapping[str, Sequence[Any]] | None = None) -> int:
        """Keeps the settings of a program run as typed. Returns the engine's micro-batch size."""
        # This imports torch, which an engine has imported already.
        from zerotune.trial_lib.rank import memory

        self.note(settled=memory.settled(engine))
        self.note_formats(memory.formats(engine))
        self.note_varied(varied or {})
        # A record that is read back holds integers of 64 bits.
        read = [option for option in reversed([*options_read()]) if abs(option.value) < 2**63]
        self.note(options={name: option.value for option in read for name in option.names})
        self._note_adam(engine)
        train, micro = int(engine.train_batch_size()), int(engine.train_micro_batch_size_per_gpu())
        accumulation = int(engine.gradient_accumulation_steps())
        if getattr(engine, "zenflow", False):
            # deepspeed/runtime/zenflow/engine.py: its interval then replaces the accumulation.
            accumulation = train // (micro * replicas_of(engine))
        if tensor_parallel_size(engine) > 1 or sequence_parallel_size(engine) > 1:
            # To DeepSpeed each rank may be a replica then (deepspeed/runtime/config.py).
            train = micro * accumulation * replicas_of(engine)
        self.note(typed_batch=BatchSizes(train, micro, accumulation))
        # The code may compare it with the configuration, or make its model by it.
        target = stage_repeated(sys.argv[1:], int(engine.zero_optimization_stage()))
        if target is not None and target not in (varied or {}):
            self.found.arg_mappings.setdefault("zero_optimization.stage", target)
        return micro

    def _note_adam(self, engine: Any) -> None:
        # Keeps whether torch's Adam is fused, the code's or that of `torch_adam` in the configuration.
        optimizer = getattr(engine, "basic_optimizer", None)
        if f"{type(optimizer).__module__}.{type(optimizer).__qualname__}" in _ADAMS:
            own = bool(getattr(optimizer, "defaults", {}).get("fused"))
            self.found.turnable[FUSED] = [own, not own]
            if optimizer not in torch_functions.of_the_trainer:
                self.forget_options([OPTIMIZER_OPTION])
        elif getattr(engine, "client_optimizer", None) is None:
            reason = "DeepSpeed makes the optimizer, and optimizer.params.torch_adam is not true"
            self.found.not_turnable[FUSED] = reason
        else:
            self.found.not_turnable[FUSED] = "the code makes no Adam of torch's"

    def note_own_switches(self, is_compiled: bool) -> None:
        """Takes out switches that the program itself turns, in a run in which ZeroTune has turned none."""
        # Whether ZeroTune could turn it as well does not matter then.
        turnable, not_turnable = self.found.turnable, self.found.not_turnable
        if torch_functions.has_recomputed() and turnable.get(CHECKPOINTING, ["none"])[0] == "none":
            turnable.pop(CHECKPOINTING, None)
            not_turnable[CHECKPOINTING] = "your code recomputes activations by itself"
        if is_compiled and COMPILE in turnable:
            del turnable[COMPILE]
            not_turnable[COMPILE] = "your code compiles by itself"

    def note_devices(self, assignment: str) -> None:
        self.note(devices_in_code=self.found.devices_in_code or assignment)

    def note_resumed(self, ds_config: Any) -> None:
        """Keeps the ZeRO stage of a checkpoint that the program resumes from, if its configuration says it."""
        zero = ds_config.get("zero_optimization") if isinstance(ds_config, Mapping) else None
        stage = zero.get("stage", 0) if isinstance(zero, Mapping) else None
        if isinstance(stage, int):
            self.note(resumed_stage=stage)

    def forget_options(self, names: Iterable[str]) -> None:
        """Forgets options of the Trainer that have no effect, because the code makes the object in its place."""
        self.note(trainer_options=[name for name in self.found.trainer_options if name not in set(names)])

    def note_formats(self, formats: Iterable[str]) -> None:
        self.note(formats=sorted({*self.found.formats, *formats}))

    def note_arrival(self, arrival: Arrival) -> None:
        self.note(
            rows_per_sample=arrival.rows_per_sample,
            batch_dimension=arrival.dimension,
            other_rows_per_sample=arrival.other_rows_per_sample,
            tokens_per_micro_batch=arrival.typed_tokens,
        )

    def note_optimizer(self, optimizer: object, by_accelerate: bool = False) -> None:
        """Keeps the class of an optimizer, if it is the first that the program made."""
        if not self.found.optimizer:
            kind = type(optimizer)
            self.note(optimizer=f"{kind.__module__}.{kind.__qualname__}", by_accelerate=by_accelerate)

    def to_json(self) -> dict[str, Any]:
        return asdict(self.found)
