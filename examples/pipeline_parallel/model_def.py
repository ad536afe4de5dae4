"""A model in two pipeline stages: DeepSpeed runs a batch's micro-batches through them, interleaved."""

import deepspeed
import torch
from torch import nn
from torch.utils.data import TensorDataset

from zerotune import DataLoader, DeepSpeedTrial, DeepSpeedTrialContext, get_ds_config_from_hparams


def samples(count: int, seed: int) -> TensorDataset:
    """Returns inputs of shape (count, 16) and the class of each, 0 or 1: whether a fixed quadratic form is positive."""
    form = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    inputs = torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (((inputs @ form) * inputs).sum(dim=1) > 0).long())


class PipelineTrial(DeepSpeedTrial):
    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.hparams = context.get_hparams()
        hidden = self.hparams.hidden
        layers = [nn.Linear(16, hidden), nn.GELU()]
        for _ in range(self.hparams.layers):
            layers += [nn.Linear(hidden, hidden), nn.GELU()]
        layers.append(nn.Linear(hidden, 2))
        model = deepspeed.PipelineModule(
            layers=layers, loss_fn=nn.CrossEntropyLoss(), num_stages=self.hparams.pipeline_parallel_size
        )
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
            config=get_ds_config_from_hparams(self.hparams),
        )
        self.engine = context.wrap_model_engine(engine)

    def build_training_data_loader(self) -> DataLoader:
        size = self.context.train_micro_batch_size_per_gpu
        return DataLoader(samples(8192, seed=1), batch_size=size, shuffle=True, drop_last=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(samples(1024, seed=2), batch_size=self.context.train_micro_batch_size_per_gpu, drop_last=True)

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        # The engine takes its micro-batches from the loop's iterator by itself.
        return {"loss": self.engine.train_batch()}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        return {"validation_loss": self.engine.eval_batch()}
