"""The training of `train.py` as a `DeepSpeedTrial`: the loop, checkpoints and the step count are the library's."""

import deepspeed
import torch
import torch.nn.functional as F
from torch.utils.data import Subset

from data import IGNORED, VOCABULARY_SIZE, MaskedText, read_text
from model import Encoder
from zerotune import DataLoader, DeepSpeedTrial, DeepSpeedTrialContext, get_ds_config_from_hparams


class MaskedLanguageTrial(DeepSpeedTrial):
    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.hparams = context.get_hparams()
        model = Encoder(
            VOCABULARY_SIZE, self.hparams.seq_length, self.hparams.hidden, self.hparams.layers, self.hparams.heads
        )
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=get_ds_config_from_hparams(self.hparams)
        )
        self.engine = context.wrap_model_engine(engine)

    def build_training_data_loader(self) -> DataLoader:
        return self._loader(range(self.hparams.training_samples))

    def build_validation_data_loader(self) -> DataLoader:
        first = self.hparams.training_samples
        return self._loader(range(first, first + self.hparams.validation_samples))

    def _loader(self, positions: range) -> DataLoader:
        text = MaskedText(read_text(self.hparams.text_bytes), self.hparams.seq_length, self.context.get_trial_seed())
        return DataLoader(Subset(text, positions), batch_size=self.context.train_micro_batch_size_per_gpu, shuffle=True)

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        loss = self._loss(next(dataloader_iter))
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        return {"validation_loss": self._loss(next(dataloader_iter))}

    def _loss(self, batch) -> torch.Tensor:
        tokens, labels = self.context.to_device(batch)
        return F.cross_entropy(self.engine(tokens).flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)
