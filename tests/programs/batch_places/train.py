"""Trains with DeepSpeed by a dictionary that it makes of what it is told; PLACE says in which way that is.

MICRO, ACCUMULATION and TOTAL are the three numbers of a batch, wherever they stand; the last two may stand nowhere.
With COMPUTES the code makes the total of the others. Its batches are of its own size, with FEED=engine of the engine's.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import deepspeed
import torch
import yaml

NAMES = ("micro", "accumulation", "total")
IN_CODE = {"micro": 4, "accumulation": 2, "total": None}


def of_options(arguments: list[str], prefix: str = "--") -> dict[str, int | None]:
    parser = argparse.ArgumentParser()
    for name in NAMES:
        parser.add_argument(f"-{name[0]}", f"{prefix}{name}", type=int, dest=name)
    return vars(parser.parse_args(arguments))


def of_subcommands(arguments: list[str]) -> dict[str, int | None]:
    parser = argparse.ArgumentParser()
    parser.add_argument("-v", action="store_true")
    train = parser.add_subparsers(required=True).add_parser("train")
    train.add_argument("--lr", type=float)
    for name in NAMES:
        train.add_argument(f"--{name}", type=int)
    found = vars(parser.parse_args(arguments))
    return {name: found[name] for name in NAMES}


def of_overrides(arguments: list[str]) -> dict[str, int | None]:
    """As Hydra takes them: all in one row."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config-name")
    parser.add_argument("overrides", nargs="*")
    words = dict(word.split("=") for word in parser.parse_args(arguments).overrides)
    return {name: int(words[f"trainer.{name}"]) if f"trainer.{name}" in words else None for name in NAMES}


def of_words(arguments: list[str]) -> dict[str, int | None]:
    return {name: None if word == "-" else int(word) for name, word in zip(NAMES, arguments, strict=True)}


def of_file(arguments: list[str]) -> dict[str, int | None]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    text = parser.parse_args(arguments).config.read_text()
    trainer = (json.loads if os.environ["PLACE"] == "json" else yaml.safe_load)(text)["trainer"]
    return {name: trainer.get(name) for name in NAMES}


def of_environment(arguments: list[str]) -> dict[str, int | None]:
    return {name: int(os.environ[name.upper()]) if name.upper() in os.environ else None for name in NAMES}


PLACES = {
    "option": of_options,
    "dotted": lambda arguments: of_options(arguments, "--trainer."),
    "subcommand": of_subcommands,
    "override": of_overrides,
    "word": of_words,
    "yaml": of_file,
    "json": of_file,
    "variable": of_environment,
    "code": lambda arguments: IN_CODE,
}

batch = PLACES[os.environ["PLACE"]](sys.argv[1:])
micro, accumulation, total = (batch[name] for name in NAMES)
config = {
    "train_micro_batch_size_per_gpu": micro,
    "gradient_accumulation_steps": accumulation,
    "train_batch_size": total,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000, "allgather_bucket_size": 1000},
}
config = {key: value for key, value in config.items() if value is not None}
if "COMPUTES" in os.environ:
    config["train_batch_size"] = micro * (accumulation or 1) * int(os.environ["WORLD_SIZE"])

deepspeed.init_distributed()
model = torch.nn.Linear(4, 1)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
own = (engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps(), engine.train_batch_size())
print("engine", *own, flush=True)
size = engine.train_micro_batch_size_per_gpu() if os.environ["FEED"] == "engine" else micro
for _ in range(int(os.environ.get("STEPS", "1000"))):
    engine.backward(engine(torch.ones(size, 4, device=engine.device)).sum())
    engine.step()
