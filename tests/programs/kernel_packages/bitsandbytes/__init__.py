"""Stands for bitsandbytes 0.50: operators, a 4-bit layer and an optimizer, with the package's signatures."""

import torch

from . import _ops as _ops
from . import nn as nn
from . import optim as optim

supported_torch_devices = {"cpu", "cuda", "xpu"}
if torch.cuda.is_available():
    # As its module of CUDA kernels does.
    stream = torch._C._cuda_getCurrentRawStream
