"""Number formats of arithmetic, states and communication."""

from trial_lib.space.effects import STAGE_1_2, STAGE_3, Effect, KnownKnob

_MASTER = "bf16.bf16_master_weights_and_grads"

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
    _MASTER: KnownKnob(
        "switch",
        (Effect("base_optimizer.py _configure_master_weights", (1, 2, 3), when={"bf16.enabled": (True,)}),),
        default=False,
        is_coarse=True,
        changes_mathematics=True,
        since="0.18.3",
    ),
    "bf16.bf16_optimizer_states": KnownKnob(
        "switch",
        (
            Effect(
                "base_optimizer.py _configure_master_weights",
                (1, 2, 3),
                when={"bf16.enabled": (True,), _MASTER: (True,)},
            ),
        ),
        default=False,
        is_coarse=True,
        changes_mathematics=True,
        since="0.18.3",
    ),
    "data_types.grad_accum_dtype": KnownKnob(
        ("fp32", "fp16", "bf16"),
        # Stage 0 takes the model's own type only: engine.py _do_optimizer_sanity_check.
        (Effect(f"{STAGE_1_2}, {STAGE_3} gradient_accumulation_dtype", (1, 2, 3)),),
        is_coarse=True,
        changes_mathematics=True,
    ),
}
