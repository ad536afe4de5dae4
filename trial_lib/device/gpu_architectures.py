"""The variable with the architectures that DeepSpeed's ops are built for. torch reads more spellings than DeepSpeed.

Some images set it to `9.0a`, which torch takes. DeepSpeed 0.19.8 raises a `ValueError` for anything but numbers, in
`compute_capability_args` of `deepspeed/ops/op_builder/builder.py`. Seen in an image for the H200.
"""

import re
from collections.abc import Mapping

VARIABLE = "TORCH_CUDA_ARCH_LIST"
_NUMBER = re.compile(r"\d+\.\d+(\+PTX)?")


def unread_architectures(environment: Mapping[str, str]) -> str:
    """What DeepSpeed cannot read in the variable, and the remedy; empty if it can read it.

    >>> unread_architectures({"TORCH_CUDA_ARCH_LIST": "8.0 9.0+PTX"})
    ''
    """
    value = environment.get(VARIABLE, "")
    unread = [word for word in value.replace(";", " ").split() if not _NUMBER.fullmatch(word)]
    if not unread:
        return ""
    numbers = "numbers such as 9.0 or 9.0+PTX"
    return (
        f"{VARIABLE} has {', '.join(unread)}. DeepSpeed builds its ops by it, and reads only {numbers}. "
        "Set it to the number of your GPU, or unset it."
    )
