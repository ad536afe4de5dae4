"""The same training as a trial class."""

import deepspeed
import torch
from llama import Llama, Shape

from zerotune import DataLoader, DeepSpeedTrial, DeepSpeedTrialContext, get_ds_config_from_hparams


class LlamaTrial(DeepSpeedTrial):
    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.hparams = context.get_hparams()
        self.shape = Shape(**{name: self.hparams[name] for name in Shape.__dataclass_fields__})
        torch.manual_seed(1)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = Llama(self.shape)
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=get_ds_config_from_hparams(self.hparams)
        )
        self.engine = context.wrap_model_engine(engine)

    def build_training_data_loader(self) -> DataLoader:
        tokens = torch.Generator().manual_seed(1)
        data = torch.randint(0, self.shape.vocabulary, (2048, self.shape.length), generator=tokens)
        return DataLoader(data, batch_size=self.context.train_micro_batch_size_per_gpu)

    def build_validation_data_loader(self) -> DataLoader:
        return self.build_training_data_loader()

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        loss = self.engine(self.context.to_device(next(dataloader_iter)))
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def evaluate_batch(self, dataloader_iter, batch_idx):
        return {"validation_loss": self.engine(self.context.to_device(next(dataloader_iter)))}
