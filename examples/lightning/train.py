"""Lightning with its DeepSpeed strategy: a regression on made-up numbers, on processors or GPUs."""

import argparse

import lightning as L
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch.utils.data import DataLoader, TensorDataset


class AnyDevice(DeepSpeedStrategy):
    """Lightning's own strategy insists on CUDA. On GPUs `DeepSpeedStrategy` does as well."""

    @property
    def root_device(self) -> torch.device:
        device = super().root_device
        return torch.device("cpu", self.local_rank) if device.type == "cpu" else device

    def setup_environment(self) -> None:
        if isinstance(self.accelerator, CPUAccelerator):
            self.accelerator.setup_device(self.root_device)
            self.set_world_ranks()
            self._init_deepspeed_distributed()
        else:
            super().setup_environment()


class Model(L.LightningModule):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))

    def training_step(self, batch, _):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.layers(inputs), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--stage", type=int, default=2)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    inputs = torch.randn(4096, 32)
    loader = DataLoader(TensorDataset(inputs, inputs.mean(1, keepdim=True)), arguments.batch_size)
    trainer = L.Trainer(
        devices=2,
        strategy=AnyDevice(stage=arguments.stage),
        accumulate_grad_batches=arguments.accumulate,
        max_steps=60,
        enable_checkpointing=False,
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Model(), loader)
    engine = trainer.strategy.deepspeed_engine
    counts = engine.train_micro_batch_size_per_gpu, engine.gradient_accumulation_steps, engine.train_batch_size
    print("engine", *(count() for count in counts))
