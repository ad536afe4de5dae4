"""Turns the switches of a candidate around `deepspeed.initialize`, and finds those that a program has.

A program keeps its code. The model that it hands to `deepspeed.initialize` is changed before the engine exists, or the
engine is changed after that.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trial_lib.turned import activation_checkpointing as checkpointing
from trial_lib.turned import attention, compiled, own_ways
from trial_lib.turned.facts import TurnableFacts
from trial_lib.turned.found import Found
from trial_lib.wire.turned import ATTENTION, CHECKPOINTING, COMPILE


@dataclass(frozen=True)
class _Way:
    """How a switch is found and turned.

    Attributes:
        find: returns the values that a model can have, the program's own first, or the reason why it has none.
        before: turns it in a model, before the engine exists. None for a switch that an engine has.
        after: turns it in an engine. None for a switch that a model has.
    """

    find: Callable[[Any], Found]
    before: Callable[[Any, Any], None] | None = None
    after: Callable[[Any, Any], None] | None = None


# In this order: blocks are wrapped before the whole is compiled.
_WAYS: dict[str, _Way] = {
    ATTENTION: _Way(attention.find, before=attention.turn),
    CHECKPOINTING: _Way(checkpointing.find, before=checkpointing.turn),
    COMPILE: _Way(compiled.find, after=compiled.turn),
}


class Turning:
    """The switches of one candidate.

    Args:
        wanted: the values, by name. Other switches stay as they are in the program. None for no switch.
        facts: records which switches the first engine's program has. None to look for none.
    """

    def __init__(self, wanted: Mapping[str, Any] | None, facts: TurnableFacts | None = None) -> None:
        self._wanted = dict(wanted or {})
        self._facts = facts

    def before(self, arguments: dict[str, Any]) -> None:
        """Turns switches of a model. Call it before an engine that trains is made.

        Args:
            arguments: of `deepspeed.initialize`, by name.
        """
        model = arguments.get("model")
        if model is None:
            return
        facts = self._facts
        if facts is not None and not _WAYS.keys() & (facts.turnable.keys() | facts.not_turnable.keys()):
            if not self._wanted:
                own_ways.watch()
            for place, way in _WAYS.items():
                found = way.find(model)
                if found.values:
                    facts.turnable[place] = list(found.values)
                else:
                    facts.not_turnable[place] = found.reason
        for place, way in _WAYS.items():
            if place in self._wanted and way.before is not None:
                way.before(model, self._wanted[place])

    def after(self, engine: Any) -> None:
        """Turns switches of an engine that trains, when it is built."""
        for place, way in _WAYS.items():
            if place in self._wanted and way.after is not None:
                way.after(engine, self._wanted[place])
