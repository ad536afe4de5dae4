"""A Transformer encoder as a trial class, large enough for its memory to be seen on a CPU."""

import deepspeed
import torch
from torch import nn

from zerotune import DataLoader, DeepSpeedTrial, DeepSpeedTrialContext, get_ds_config_from_hparams

VOCABULARY, LENGTH, HIDDEN, LAYERS = 384, 128, 256, 4


class LanguageModel(nn.Module):
    """Says its tokens again."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        layer = nn.TransformerEncoderLayer(HIDDEN, 4, 4 * HIDDEN, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.layers(self.tokens(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Encoder(DeepSpeedTrial):
    """Trains it on noise."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        torch.manual_seed(1)
        model = LanguageModel()
        config = get_ds_config_from_hparams(context.get_hparams())
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        self.engine = context.wrap_model_engine(engine)

    def build_training_data_loader(self):
        data = torch.randint(0, VOCABULARY, (512, LENGTH))
        return DataLoader(data, batch_size=self.context.train_micro_batch_size_per_gpu)

    def build_validation_data_loader(self):
        return self.build_training_data_loader()

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        loss = self.engine(self.context.to_device(next(dataloader_iter)))
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def evaluate_batch(self, dataloader_iter, batch_idx):
        return {"validation_loss": self.engine(self.context.to_device(next(dataloader_iter)))}
