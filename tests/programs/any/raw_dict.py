"""Trains with DeepSpeed; its configuration stands in the code, the size of its batches is the engine's."""

import argparse

import deepspeed
from stopwatch import Stopwatch

from model import LanguageModel, Sentences

DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000},
    "steps_per_print": 1_000_000,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()

    model = LanguageModel()
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=Sentences(), config_params=DEEPSPEED
    )
    size, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    data, stopwatch = iter(loader), Stopwatch()
    for _ in range(args.steps):
        for _ in range(accumulation):
            loss = engine(next(data).to(engine.device))
            engine.backward(loss)
            engine.step()
        stopwatch.step(size * accumulation)
    stopwatch.report()


if __name__ == "__main__":
    main()
