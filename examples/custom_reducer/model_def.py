"""A metric that is no average of its batches: the macro F1 score of a classifier of rare classes."""

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from zerotune import (
    DataLoader,
    DeepSpeedTrial,
    DeepSpeedTrialContext,
    MetricReducer,
    get_ds_config_from_hparams,
)

CLASSES = 4


def samples(count: int, seed: int) -> TensorDataset:
    """Returns points of shape (count, 2) and their classes; the first class is as frequent as all others together."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.multinomial(torch.tensor([0.5, 0.3, 0.15, 0.05]), count, replacement=True, generator=random)
    centres = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 2.0]])
    return TensorDataset(centres[labels] + 0.6 * torch.randn(count, 2, generator=random), labels)


class MacroF1(MetricReducer):
    """Adds up the confusion matrix on every rank, and takes the score of the sum over the ranks."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.confusion = torch.zeros(CLASSES, CLASSES)

    def update(self, predicted: torch.Tensor, labels: torch.Tensor) -> None:
        self.confusion += (
            torch.bincount(labels * CLASSES + predicted, minlength=CLASSES**2).view(CLASSES, CLASSES).cpu()
        )

    def per_slot_reduce(self) -> torch.Tensor:
        return self.confusion

    def cross_slot_reduce(self, per_slot_metrics: list[torch.Tensor]) -> float:
        confusion = torch.stack(per_slot_metrics).sum(dim=0)
        right = confusion.diagonal()
        return float((2 * right / (confusion.sum(dim=0) + confusion.sum(dim=1)).clamp(min=1)).mean())


class ClassifierTrial(DeepSpeedTrial):
    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, CLASSES))
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=get_ds_config_from_hparams(context.get_hparams())
        )
        self.engine = context.wrap_model_engine(engine)
        self.macro_f1 = context.wrap_reducer(MacroF1(), name="macro_f1", for_training=False)
        # A function is given all values of all ranks.
        self.largest_loss = context.wrap_reducer(max, name="largest_loss")

    def build_training_data_loader(self) -> DataLoader:
        size = self.context.train_micro_batch_size_per_gpu
        return DataLoader(samples(8192, seed=1), batch_size=size, shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(samples(1024, seed=2), batch_size=128)

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        points, labels = self.context.to_device(next(dataloader_iter))
        loss = F.cross_entropy(self.engine(points), labels)
        self.engine.backward(loss)
        self.engine.step()
        self.largest_loss.update(loss.item())
        return loss

    def evaluate_batch(self, dataloader_iter, batch_idx):
        points, labels = self.context.to_device(next(dataloader_iter))
        logits = self.engine(points)
        self.macro_f1.update(logits.argmax(dim=1), labels)
        loss = F.cross_entropy(logits, labels)
        self.largest_loss.update(loss.item())
        return {"validation_loss": loss}
