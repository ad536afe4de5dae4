"""Trains with DeepSpeed; the size of its batches is a flag of its command line."""

import argparse

import deepspeed
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, DistributedSampler

from model import LanguageModel, Sentences

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", "--local-rank", type=int, default=-1)
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--workers", type=int, default=1)
args = deepspeed.add_config_arguments(parser).parse_args()

deepspeed.init_distributed()
sentences = Sentences()
loader = DataLoader(
    sentences,
    batch_size=args.batch_size,
    sampler=DistributedSampler(sentences),
    num_workers=args.workers,
    drop_last=True,
)
model = LanguageModel()
engine, *_ = deepspeed.initialize(args, model, model_parameters=model.parameters())
accumulation = engine.gradient_accumulation_steps()
stopwatch = Stopwatch()
for number, sentence in enumerate(loader, start=1):
    loss = engine(sentence.to(engine.device))
    engine.backward(loss)
    engine.step()
    if number % accumulation == 0:
        stopwatch.step(args.batch_size * accumulation)
    if number == args.steps * accumulation:
        break
stopwatch.report()
engine.save_checkpoint("checkpoints")
