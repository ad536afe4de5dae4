"""Fire makes a command line of a class; a function computes the DeepSpeed configuration from what is typed.

DeepSpeed reports to TensorBoard, and a size has data for two epochs, however few steps those are.
"""

import os
from typing import Any

import deepspeed
import fire
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

FEATURES, ROWS = 48, 2400


def configuration(micro: int, accumulate: int, stage: int, offload: bool) -> dict[str, Any]:
    place = {"device": "cpu" if offload else "none"}
    return {
        "train_batch_size": micro * accumulate * int(os.environ["WORLD_SIZE"]),
        "train_micro_batch_size_per_gpu": micro,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": place,
            "offload_param": place,
            "overlap_comm": False,
        },
        "gradient_clipping": 1.0,
        "tensorboard": {"enabled": True, "output_path": "boards", "job_name": "job"},
    }


class Job:
    def train(
        self, micro: int = 2, accumulate: int = 1, stage: int = 2, offload: bool = False, epochs: int = 2
    ) -> dict[str, Any]:
        deepspeed.init_distributed()
        torch.manual_seed(9)
        model = nn.Sequential(nn.Linear(FEATURES, 192), nn.Mish(), nn.Linear(192, FEATURES))
        config = configuration(micro, accumulate, stage, offload)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        own = (engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps())
        print("engine", *own, engine.train_batch_size(), flush=True)
        rows = torch.randn(ROWS, FEATURES)
        sampler = DistributedSampler(rows)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for inputs in DataLoader(rows, micro, sampler=sampler, drop_last=True):
                inputs = inputs.to(engine.device)
                engine.backward(nn.functional.mse_loss(engine(inputs), inputs))
                engine.step()
        return {"updates": engine.global_steps}


if __name__ == "__main__":
    fire.Fire(Job)
