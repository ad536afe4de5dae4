"""Model parallelism of one's own: DeepSpeed is given its groups, the loop a `ModelParallelUnit`."""

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from torch.utils.data import TensorDataset

from tensor_parallel import ParallelFeedForward
from zerotune import (
    DataLoader,
    DeepSpeedTrial,
    DeepSpeedTrialContext,
    ModelParallelUnit,
    get_ds_config_from_hparams,
)


def samples(count: int, seed: int) -> TensorDataset:
    """Returns inputs of shape (count, 8) and targets of shape (count, 1): the product of the first two inputs."""
    inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs[:, :1] * inputs[:, 1:2])


class TensorParallelTrial(DeepSpeedTrial):
    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.hparams = context.get_hparams()
        ranks = self.hparams.tensor_parallel_size
        replicas = context.distributed.size // ranks
        grid = PipelineParallelGrid(PipeModelDataParallelTopology(num_pp=1, num_mp=ranks, num_dp=replicas))
        rank = grid.get_model_parallel_rank()
        model = ParallelFeedForward(8, self.hparams.hidden, 1, rank, ranks, grid.get_model_parallel_group())
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), mpu=grid, config=get_ds_config_from_hparams(self.hparams)
        )
        self.engine = context.wrap_model_engine(engine)
        context.set_mpu(
            ModelParallelUnit(
                data_parallel_rank=grid.get_data_parallel_rank(),
                data_parallel_world_size=replicas,
                should_report_metrics=rank == 0,
                should_build_data_loader=True,
            )
        )

    def build_training_data_loader(self) -> DataLoader:
        size = self.context.train_micro_batch_size_per_gpu
        return DataLoader(samples(8192, seed=1), batch_size=size, shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(samples(1024, seed=2), batch_size=128)

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        loss = self._loss(next(dataloader_iter))
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        return {"validation_loss": self._loss(next(dataloader_iter))}

    def _loss(self, batch) -> torch.Tensor:
        inputs, targets = self.context.to_device(batch)
        return F.mse_loss(self.engine(inputs), targets)
