"""Is configured by Hydra, which takes key=value, makes a folder for each run and changes to it.

The DeepSpeed configuration is a group of Hydra's, and has its batch from the section of the loop.
"""

from pathlib import Path

import deepspeed
import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@hydra.main(version_base=None, config_path="settings", config_name="main")
def main(settings: DictConfig) -> None:
    deepspeed.init_distributed()
    torch.manual_seed(5)
    width = settings.width
    model = nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))
    config = OmegaConf.to_container(settings.engine, resolve=True)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    micro = engine.train_micro_batch_size_per_gpu()
    print("engine", micro, engine.gradient_accumulation_steps(), engine.train_batch_size(), flush=True)

    rows = TensorDataset(torch.randn(2048, width))
    loader = DataLoader(rows, settings.loop.batch, sampler=DistributedSampler(rows), drop_last=True)
    steps = 0
    while steps < settings.loop.micro_steps:
        for (inputs,) in loader:
            inputs = inputs.to(engine.device)
            loss = nn.functional.mse_loss(engine(inputs), inputs)
            engine.backward(loss)
            engine.step()
            steps += 1
            if steps % 20 == 0 and engine.global_rank == 0:
                # In the folder of this run, which is the working folder by now.
                with Path("losses.txt").open("a") as file:
                    file.write(f"{loss.item()}\n")
            if steps == settings.loop.micro_steps:
                break


if __name__ == "__main__":
    main()
