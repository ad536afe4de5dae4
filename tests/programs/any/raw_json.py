"""Trains with DeepSpeed; the size of its batches stands in the JSON file that its command line names."""

import argparse
import json
from pathlib import Path

import deepspeed
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, DistributedSampler

from model import LanguageModel, Sentences

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--deepspeed_config", type=Path, required=True)
args = parser.parse_args()

config = json.loads(args.deepspeed_config.read_text())
size, accumulation = config["train_micro_batch_size_per_gpu"], config.get("gradient_accumulation_steps", 1)
deepspeed.init_distributed()
sentences = Sentences()
loader = DataLoader(sentences, batch_size=size, sampler=DistributedSampler(sentences), drop_last=True)

model = LanguageModel()
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=str(args.deepspeed_config))
stopwatch = Stopwatch()
for number, sentence in enumerate(loader, start=1):
    engine.backward(engine(sentence.to(engine.device)))
    engine.step()
    if number % accumulation == 0:
        stopwatch.step(size * accumulation)
    if number == args.steps * accumulation:
        break
stopwatch.report()
