"""The states of all random number generators of a rank. A resumed training draws as an uninterrupted one.

A captured state has numbers, strings, lists, dicts and tensors, and is read back without pickle.
"""

import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seeds Python, numpy, and torch on all devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture() -> dict[str, Any]:
    """Returns the states of Python's `random`, numpy's global generator, and torch's on the CPU and this rank's device.

    A rank draws on one device, the current one. `cuda` is None if none is in use.
    """
    version, internal, next_gauss = random.getstate()
    return {
        "python": [version, list(internal), next_gauss],
        "numpy": _plain(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
        # Asking an unused device for its state would create a context on it.
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def restore(states: dict[str, Any]) -> None:
    """Restores the result of `capture`. The next draws are those that followed it.

    Raises:
        ValueError: numpy's global generator has been replaced by one of another kind.
    """
    version, internal, next_gauss = states["python"]
    random.setstate((version, tuple(internal), next_gauss))
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _plain(value: Any) -> Any:
    """Returns a state of a numpy generator with lists instead of arrays and Python's numbers instead of numpy's."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value
