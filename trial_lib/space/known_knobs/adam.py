"""Forms of the Adam that DeepSpeed makes by its configuration: its own kernels, or PyTorch's."""

from collections.abc import Mapping

from trial_lib.space.effects import Effect, KnownKnob, Surroundings

TORCH_ADAM = "optimizer.params.torch_adam"
_SOURCE = "engine.py get_optimizer_configuration"


def _makes_adam(here: Surroundings) -> bool:
    section = here.own("optimizer")
    named = str(section.get("type", "")) if isinstance(section, Mapping) else ""
    return named.lower() in ("adam", "adamw") and not here.code_optimizer


_OTHERWISE = "it takes an Adam or AdamW in the DeepSpeed configuration, and no optimizer of the code's"

ADAM: dict[str, KnownKnob] = {
    # DeepSpeed's kernels are built at their first use, and update in place.
    TORCH_ADAM: KnownKnob(
        "switch",
        (Effect(_SOURCE, holds=_makes_adam, otherwise=_OTHERWISE),),
        default=False,
        is_coarse=True,
    ),
    "optimizer.params.fused": KnownKnob(
        "switch",
        # DeepSpeed's own Adam refuses the key.
        (Effect(_SOURCE, when={TORCH_ADAM: (True,)}, holds=_makes_adam, otherwise=_OTHERWISE),),
        word="fused",
    ),
}
