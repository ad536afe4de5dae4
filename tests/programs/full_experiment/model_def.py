"""The smallest trial class that trains: fits the sum of four numbers."""

import time

import deepspeed
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from zerotune import DataLoader, DeepSpeedTrial, DeepSpeedTrialContext, get_ds_config_from_hparams


def samples(count: int, seed: int) -> TensorDataset:
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


class Tiny(DeepSpeedTrial):
    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.hparams = context.get_hparams()
        model = torch.nn.Linear(4, 1)
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=get_ds_config_from_hparams(self.hparams)
        )
        self.engine = context.wrap_model_engine(engine)

    def build_training_data_loader(self):
        return DataLoader(samples(64, 0), batch_size=self.context.train_micro_batch_size_per_gpu, shuffle=True)

    def build_validation_data_loader(self):
        return DataLoader(samples(8, 1), batch_size=2)

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        time.sleep(self.hparams.get("step_seconds", 0.0))
        loss = self._loss(dataloader_iter)
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        return {"validation_loss": self._loss(dataloader_iter)}

    def _loss(self, dataloader_iter):
        inputs, sums = self.context.to_device(next(dataloader_iter))
        return F.mse_loss(self.engine(inputs), sums)
