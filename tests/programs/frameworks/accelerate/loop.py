"""A loop of one's own with Accelerate, whose ZeRO stage stands in Accelerate's configuration file."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--train_batch_size", type=int, default=4)
batch_size = parser.parse_args().train_batch_size
torch.manual_seed(1)
# On a CPU Accelerate has to be told how its processes talk to each other.
cpu = [] if torch.cuda.is_available() else [InitProcessGroupKwargs(backend="gloo")]
accelerator = Accelerator(kwargs_handlers=cpu)
layer = nn.TransformerEncoderLayer(96, 4, 384, dropout=0.0, batch_first=True)
model = nn.Sequential(nn.Embedding(300, 96), nn.TransformerEncoder(layer, 2), nn.Linear(96, 300))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
words = torch.utils.data.TensorDataset(torch.randint(300, (8192, 33)))
loader = torch.utils.data.DataLoader(words, batch_size, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (tokens,) in loader:
    with accelerator.accumulate(model):
        logits = model(tokens[:, :-1])
        accelerator.backward(nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
        optimizer.step()
        optimizer.zero_grad()
