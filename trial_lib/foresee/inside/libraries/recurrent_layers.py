"""Recurrent layers, which torch runs on a device of another maker by fused kernels without a fake implementation.

Torch's own decompositions take their place. They run a layer step by step, as torch does on a CPU. On CUDA cuDNN runs
it at once, and keeps about as much for the backward pass.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import decompositions

# The function of torch, its decomposition for padded sequences and that for packed ones.
_LAYERS = (
    ("lstm", "lstm_impl", "lstm_data_impl"),
    ("gru", "gru_impl", "gru_impl_data"),
    ("rnn_tanh", "rnn_tanh_input", "rnn_tanh_data"),
    ("rnn_relu", "rnn_relu_input", "rnn_relu_data"),
)


def install() -> None:
    """Replaces the functions. A version of torch without a decomposition keeps its own. Call it once."""
    for name, of_padded, of_packed in _LAYERS:
        padded, packed = (getattr(decompositions, each, None) for each in (of_padded, of_packed))
        if padded is not None and packed is not None:
            setattr(torch._VF, name, _by_arguments(padded, packed))


def _by_arguments(padded: Callable[..., Any], packed: Callable[..., Any]) -> Callable[..., Any]:
    def layer(*arguments: Any) -> Any:
        """Replaces a function of `torch._VF`. Packed sequences have their batch sizes in the second place."""
        # A flag whether the layer has biases comes after the weights, which are the only list of tensors there.
        is_packed = isinstance(arguments[3], (list, tuple))
        return packed(*arguments) if is_packed else padded(*arguments)

    return layer
