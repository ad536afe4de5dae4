"""A library of the user's, outside the model directory: it binds DeepSpeed's function when it is imported."""

from typing import Any

import torch
from deepspeed import initialize


def engine_for(model: torch.nn.Module, args: Any) -> Any:
    return initialize(args=args, model=model, model_parameters=model.parameters())[0]
