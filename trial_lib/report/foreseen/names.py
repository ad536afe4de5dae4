"""The names and colours of what a plan's page draws: kinds of memory, moments and parts of a step."""

from trial_lib.report.plot_parts import COLOURS, GREY

BLUE, ORANGE, GREEN, PINK, VIOLET, OCHRE, OLIVE, CORAL = COLOURS
BROWN = "#96694c"

KIND_NAMES = {
    "parameter": "parameters",
    "optimizer": "optimizer states",
    "gradient": "gradients",
    "buffer": "DeepSpeed's buffers",
    "input": "batch",
    "activation": "activations",
    "logits": "logits and loss",
    "temporary": "temporary",
    "overhead": "context and fragments",
}
"""Kinds of memory as people read them. `overhead` is what the allocator, the context and libraries add."""

KIND_COLOURS = {
    "parameter": BLUE,
    "optimizer": VIOLET,
    "gradient": GREEN,
    "buffer": OCHRE,
    "input": OLIVE,
    "activation": ORANGE,
    "logits": CORAL,
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

MOMENT_PHRASES = {
    "load": "while a batch is loaded",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "update": "in the optimizer's update",
    "between": "between the passes",
}
"""Moments of a step in a sentence."""

PART_NAMES = {
    "compute": "computing",
    "launches": "launches",
    "gathering": "gathering parameters",
    "reducing": "reducing gradients",
    "exchanging": "waiting for activations",
    "transfers": "copies to and from the host",
    "disk": "NVMe drives",
    "update": "update",
    "host_update": "update on the host",
    "data": "loading data",
}
"""Parts of a step's time."""

PART_COLOURS = {
    "compute": BLUE,
    "launches": PINK,
    "gathering": ORANGE,
    "reducing": GREEN,
    "exchanging": CORAL,
    "transfers": OCHRE,
    "disk": BROWN,
    "update": VIOLET,
    "host_update": OLIVE,
    "data": GREY,
}
"""One colour for a part, in all figures of a page."""


def faint(colour: str, opacity: float) -> str:
    """Returns a colour such as `#2f81d6` with an opacity from 0 to 1."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"
