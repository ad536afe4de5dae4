"""Answers for code that asks a fake tensor for a number: a table of known askers, and a default for all others.

An asker is named by the end of its file's path and by its function. The first row that fits answers. A yes or no is no,
unless a row says True or the code fails by a no.
"""

from dataclasses import dataclass
from typing import Any

FINITE = 1.0
"""The default for a floating-point number: neither zero nor infinite."""


@dataclass(frozen=True)
class KnownAsker:
    """One place in a library that asks for a number.

    Attributes:
        path: the end of its file's path.
        function: its name; empty for every function of the file.
        answer: the value that a healthy training gives there.
        why: the meaning of the number.
    """

    path: str
    function: str
    answer: Any
    why: str


KNOWN: tuple[KnownAsker, ...] = (
    KnownAsker("deepspeed/runtime/utils.py", "has_overflow", False, "whether gradients overflow"),
    KnownAsker("deepspeed/runtime/utils.py", "check", False, "whether gradients overflow"),
    KnownAsker("deepspeed/runtime/utils.py", "_has_inf_or_nan", FINITE, "the sum of a gradient"),
    KnownAsker("deepspeed/runtime/utils.py", "", FINITE, "a norm"),
    KnownAsker("deepspeed/runtime/zero/stage3.py", "has_overflow", False, "whether gradients overflow"),
    KnownAsker("deepspeed/runtime/zero/stage3.py", "", FINITE, "a norm, or a sum of gradients"),
    KnownAsker("deepspeed/runtime/zero/stage_1_and_2.py", "has_overflow", False, "whether gradients overflow"),
    KnownAsker("deepspeed/runtime/zero/stage_1_and_2.py", "", FINITE, "a norm, or a sum of gradients"),
    KnownAsker("deepspeed/runtime/zero/partition_parameters.py", "", False, "whether a rank has modified parameters"),
    KnownAsker("deepspeed/runtime/bf16_optimizer.py", "", FINITE, "a norm"),
    KnownAsker("deepspeed/runtime/fp16/", "", FINITE, "a norm, a sum of gradients or a loss scale"),
    KnownAsker("deepspeed/runtime/engine.py", "", FINITE, "a loss or a norm"),
    KnownAsker("deepspeed/runtime/pipe/engine.py", "", FINITE, "a loss, or the shape that another stage sends"),
    KnownAsker("deepspeed/runtime/tensor_parallel/tp_manager.py", "", True, "whether ranks have the same batch"),
    KnownAsker("deepspeed/runtime/zero/", "", FINITE, "a norm, a sum of gradients or whether they overflow"),
    KnownAsker("deepspeed/module_inject/", "", True, "whether ranks have the same batch"),
    KnownAsker("deepspeed/moe/", "", FINITE, "a loss, or the capacity of an expert"),
    KnownAsker("transformers/trainer.py", "_run_epoch", False, "whether a loss is not a number, for the log"),
    KnownAsker("transformers/trainer.py", "_inner_training_loop", False, "likewise, before transformers 5"),
    KnownAsker("transformers/trainer.py", "", FINITE, "a loss or a norm, for the log"),
    KnownAsker("transformers/trainer_callback.py", "", FINITE, "a metric"),
    KnownAsker("transformers/trainer_pt_utils.py", "", FINITE, "a metric"),
    KnownAsker("transformers/masking_utils.py", "", True, "whether a mask hides nothing"),
    KnownAsker("transformers/modeling_attn_mask_utils.py", "", True, "whether a mask hides nothing"),
    KnownAsker("transformers/modeling_flash_attention_utils.py", "", False, "whether a batch is packed"),
    *(
        KnownAsker(f"transformers/models/{model}/", "get_image_features", True, "which images are more than padding")
        for model in ("idefics2", "idefics3", "modernvbert", "smolvlm", "ultravbert")
    ),
    KnownAsker("transformers/loss/", "generalized_box_iou", True, "whether boxes have their corners in order"),
    KnownAsker("transformers/initialization.py", "", False, "whether numbers lie outside their range"),
    KnownAsker("transformers/generation/utils.py", "_beam_search", True, "whether a beam goes on"),
    KnownAsker("transformers/generation/", "", False, "whether all texts have ended"),
    KnownAsker("accelerate/utils/deepspeed.py", "", FINITE, "a norm, for the log"),
    KnownAsker("accelerate/accelerator.py", "", FINITE, "a norm, or the flag of a trigger"),
    KnownAsker("accelerate/optimizer.py", "", FINITE, "a loss scale"),
    KnownAsker("accelerate/utils/operations.py", "", FINITE, "a size that ranks agree on"),
    KnownAsker("peft/", "", FINITE, "a scale"),
    KnownAsker("trl/", "", FINITE, "a metric, for the log"),
    KnownAsker("liger_kernel/", "", True, "whether a loss has no factor, and whether its labels are in range"),
    KnownAsker("lightning/", "", FINITE, "a metric, or whether it is finite"),
    KnownAsker("pytorch_lightning/", "", FINITE, "a metric, or whether it is finite"),
    KnownAsker("torch/nn/modules/_functions.py", "forward", True, "which ranks have samples for a shared norm"),
    KnownAsker("torch/nn/utils/clip_grad.py", "", FINITE, "a norm"),
    KnownAsker("torch/amp/grad_scaler.py", "", 0.0, "how many gradients are infinite"),
    KnownAsker("torch/optim/", "", FINITE, "a count of steps"),
)
"""The asks of libraries. A row of a file without a function stands for all others of its file, so it comes last."""


def known(path: str, function: str) -> KnownAsker | None:
    """Returns the row for an asker; None if it is unknown."""
    for row in KNOWN:
        is_here = f"/{row.path}" in path if row.path.endswith("/") else path.endswith(f"/{row.path}")
        if is_here and row.function in ("", function):
            return row
    return None
