"""Masked language modelling on text that every machine has: the sources of Python's standard library."""

import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

MASK = 256  # the bytes themselves are tokens 0 to 255
VOCABULARY_SIZE = 257
IGNORED = -100  # the label of a position that the loss leaves out


def read_text(max_bytes: int) -> np.ndarray:
    """Returns the top-level modules of the standard library one after another, in the order of their names."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(module.read_bytes() for module in modules)
    return np.frombuffer(text[:max_bytes], dtype=np.uint8).astype(np.int64)


class MaskedText(Dataset):
    """An endless stream of text windows with masked bytes.

    A sample is a function of the seed and of its position in the stream, and of nothing else: a training that stops
    and resumes at some position, on any number of ranks, sees what it would have seen had it not stopped.
    """

    def __init__(self, text: np.ndarray, seq_length: int, seed: int, mask_probability: float = 0.15):
        self.text = text
        self.seq_length = seq_length
        self.seed = seed
        self.mask_probability = mask_probability

    def __getitem__(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        rng = np.random.default_rng([self.seed, position])
        start = rng.integers(len(self.text) - self.seq_length)
        window = self.text[start : start + self.seq_length]
        masked = rng.random(self.seq_length) < self.mask_probability
        tokens = np.where(masked, MASK, window)
        labels = np.where(masked, window, IGNORED)
        return torch.from_numpy(tokens), torch.from_numpy(labels)
