"""The names and colours of what a plan's page draws: kinds of memory, parts of a step."""

from trial_lib.report.plot_parts import COLOURS, GREY

BLUE, ORANGE, GREEN, PINK, VIOLET, OCHRE, OLIVE, CORAL = COLOURS

KIND_NAMES = {
    "parameter": "parameters",
    "optimizer": "optimizer states",
    "gradient": "gradients",
    "buffer": "DeepSpeed's buffers",
    "input": "batch",
    "activation": "activations",
    "temporary": "temporary",
    "overhead": "context and fragments",
}
"""Kinds of memory, as people read them. `overhead` is what the allocator, the context and libraries add."""

KIND_COLOURS = {
    "parameter": BLUE,
    "optimizer": VIOLET,
    "gradient": GREEN,
    "buffer": OCHRE,
    "input": OLIVE,
    "activation": ORANGE,
    "temporary": PINK,
    "overhead": GREY,
}
"""One colour for a kind, in all figures of a page."""

MOMENT_NAMES = {
    "initialize": "initialise",
    "load": "load",
    "forward": "forward",
    "backward": "backward",
    "update": "update",
    "between": "",
}
"""Moments of a run. Code between them has no name."""


def faint(colour: str, opacity: float) -> str:
    """Returns a colour such as `#2f81d6` with an opacity from 0 to 1."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"
