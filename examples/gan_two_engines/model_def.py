"""A generative adversarial network, each of its two networks in an engine of its own: points on a ring."""

import math

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from zerotune import DataLoader, DeepSpeedTrial, DeepSpeedTrialContext, get_ds_config_from_hparams


def ring(samples: int, seed: int) -> torch.Tensor:
    """Returns noisy points on the unit circle, of shape (samples, 2)."""
    random = torch.Generator().manual_seed(seed)
    angles = 2 * math.pi * torch.rand(samples, generator=random)
    noise = 0.05 * torch.randn(samples, 2, generator=random)
    return torch.stack([angles.cos(), angles.sin()], dim=1) + noise


def network(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, hidden), nn.LeakyReLU(0.2),
        nn.Linear(hidden, outputs),
    )  # fmt: skip


class RingGanTrial(DeepSpeedTrial):
    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.hparams = context.get_hparams()
        # The first engine's batches are what is counted: a batch of the loader makes one of the generator.
        self.generator = self._engine(network(self.hparams.noise, self.hparams.hidden, 2))
        self.discriminator = self._engine(network(2, self.hparams.hidden, 1))

    def _engine(self, model: nn.Module):
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=get_ds_config_from_hparams(self.hparams)
        )
        return self.context.wrap_model_engine(engine)

    def build_training_data_loader(self) -> DataLoader:
        points = TensorDataset(ring(self.hparams.samples, seed=1))
        return DataLoader(points, batch_size=self.context.train_micro_batch_size_per_gpu, shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(TensorDataset(ring(512, seed=2)), batch_size=128)

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        (real,) = self.context.to_device(next(dataloader_iter))
        fake = self.generator(self._noise(len(real)))

        judged_real, judged_fake = self.discriminator(torch.cat([real, fake.detach()])).chunk(2)
        d_loss = F.softplus(-judged_real).mean() + F.softplus(judged_fake).mean()
        self.discriminator.backward(d_loss)
        self.discriminator.step()

        # The generator learns through the discriminator, which must not learn from this loss.
        self.discriminator.module.requires_grad_(False)
        g_loss = F.softplus(-self.discriminator.module(fake)).mean()
        self.generator.backward(g_loss)
        self.generator.step()
        self.discriminator.module.requires_grad_(True)
        return {"d_loss": d_loss, "g_loss": g_loss}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        (real,) = self.context.to_device(next(dataloader_iter))
        radius = self.generator(self._noise(len(real))).norm(dim=1)
        return {"distance_from_ring": (radius - 1).abs().mean()}

    def _noise(self, samples: int) -> torch.Tensor:
        return torch.randn(samples, self.hparams.noise, device=self.context.device)
