"""A training that saves a checkpoint, and goes on from the one that it finds."""

from pathlib import Path

import deepspeed
import torch
from toy import parse_arguments, small_model, train

args = parse_arguments(folder="checkpoints", saves_after=0)
model = small_model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
done = 0
if Path(args.folder, "latest").exists():
    path, state = engine.load_checkpoint(args.folder)
    done = state["done"]
    torch.set_rng_state(state["generator"])
    print(f"goes on after step {done}, engine at {engine.global_steps}, from {Path(path).name}", flush=True)
if args.saves_after:
    train(engine, args.saves_after)
    own = {"done": args.saves_after, "generator": torch.get_rng_state()}
    engine.save_checkpoint(args.folder, client_state=own)
else:
    train(engine, args.steps - done)
