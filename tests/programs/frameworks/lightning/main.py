"""`python main.py fit --config fit.yaml`: Lightning's command line, on processors too."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class AnyDevice(DeepSpeedStrategy):
    """DeepSpeedStrategy without its check for CUDA, as users of other devices write it."""

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


class Words(LightningModule):
    def __init__(self, width: int = 96, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.Sequential(nn.Embedding(300, width), nn.TransformerEncoder(layer, 2), nn.Linear(width, 300))

    def training_step(self, batch, _):
        tokens = batch[0]
        return nn.functional.cross_entropy(self.layers(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.learning_rate)


class Texts(LightningDataModule):
    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randint(300, (8192, 33))), self.batch_size)


if __name__ == "__main__":
    LightningCLI(Words, Texts)
