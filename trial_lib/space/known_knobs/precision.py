"""Number formats of arithmetic, states and communication."""

from trial_lib.space.effects import STAGE_1_2, STAGE_3, Effect, KnownKnob

PRECISION: dict[str, KnownKnob] = {
    "bf16.enabled": KnownKnob("switch", (Effect("engine.py get_data_types"),), default=False, is_coarse=True),
    "torch_autocast.enabled": KnownKnob(
        "switch",
        (Effect("torch_autocast.py autocast_if_enabled"),),
        default=False,
        is_coarse=True,
        since="0.17.2",
    ),
    "communication_data_type": KnownKnob(
        ("fp32", "fp16", "bf16"),
        (
            Effect("engine.py allreduce_bucket", (0,), replicas=2),
            # Under autocast every parameter has its own type.
            Effect(
                f"{STAGE_1_2}, {STAGE_3} comm_dtypes",
                (1, 2, 3),
                replicas=2,
                when={"torch_autocast.enabled": (False,)},
            ),
        ),
        is_coarse=True,
    ),
}
