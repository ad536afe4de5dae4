"""A small language model as a `DeepSpeedTrial`."""

import deepspeed
import torch
from torch import nn
from torch.utils.data import TensorDataset

from zerotune import DataLoader, DeepSpeedTrial, DeepSpeedTrialContext, get_ds_config_from_hparams


class LanguageTrial(DeepSpeedTrial):
    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        width = context.get_hparams().width
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        model = nn.Sequential(nn.Embedding(300, width), nn.TransformerEncoder(layer, 2), nn.Linear(width, 300))
        config = get_ds_config_from_hparams(context.get_hparams())
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        self.engine = context.wrap_model_engine(engine)

    def build_training_data_loader(self) -> DataLoader:
        words = torch.randint(300, (8192, 33), generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(words), batch_size=self.context.train_micro_batch_size_per_gpu)

    def build_validation_data_loader(self) -> DataLoader:
        return self.build_training_data_loader()

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        loss = self._loss(next(dataloader_iter))
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        return {"validation_loss": self._loss(next(dataloader_iter))}

    def _loss(self, batch) -> torch.Tensor:
        (tokens,) = self.context.to_device(batch)
        return nn.functional.cross_entropy(self.engine(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
