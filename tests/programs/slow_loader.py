"""A torch DataLoader takes 10 ms for each sample. It has as many batches as are asked for."""

import time

import deepspeed
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from toy import CLASSES, FEATURES, parse_arguments, small_model

args = parse_arguments(batches=1000, workers=0)


class SlowSamples(Dataset):
    def __len__(self) -> int:
        return int(args.batches) * engine.train_micro_batch_size_per_gpu()

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.01)
        return torch.full((FEATURES,), float(place % 7)), place % CLASSES


model = small_model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
loader = DataLoader(SlowSamples(), batch_size=engine.train_micro_batch_size_per_gpu(), num_workers=args.workers)
for inputs, labels in loader:
    engine.backward(F.cross_entropy(engine(inputs.to(engine.device)), labels.to(engine.device)))
    engine.step()
