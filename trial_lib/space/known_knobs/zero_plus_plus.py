"""ZeRO++: a second partition within a host, and quantised communication."""

from trial_lib.space.effects import STAGE_3, Effect, KnownKnob

ZERO_PLUS_PLUS: dict[str, KnownKnob] = {
    "zero_optimization.zero_hpz_partition_size": KnownKnob(
        "count",
        # A second partition over all replicas is the same as the first.
        (Effect("zero/partition_parameters.py ds_secondary_tensor", (3,), replicas=4),),
        default=1,
        is_coarse=True,
    ),
    "zero_optimization.zero_quantized_weights": KnownKnob(
        "switch",
        (Effect("zero/partition_parameters.py CUDAQuantizer", (3,), ("cuda",)),),
        default=False,
        is_coarse=True,
    ),
    "zero_optimization.zero_quantized_nontrainable_weights": KnownKnob(
        "switch",
        (
            Effect(
                "zero/partition_parameters.py CUDAQuantizer",
                (3,),
                ("cuda",),
                holds=lambda here: here.trainable_num_params < here.num_params,
                otherwise="every parameter of the model trains",
            ),
        ),
        default=False,
        is_coarse=True,
    ),
    "zero_optimization.zero_quantized_gradients": KnownKnob(
        "switch",
        (
            Effect(
                f"{STAGE_3} __avg_scatter_grads",
                (3,),
                ("cuda",),
                holds=lambda here: here.hosts > 1,
                otherwise="DeepSpeed quantizes gradients between machines, and a trial has one",
            ),
        ),
        default=False,
        is_coarse=True,
    ),
}
