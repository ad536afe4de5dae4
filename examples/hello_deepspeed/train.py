"""Trains a Transformer encoder on masked language modelling with DeepSpeed.

deepspeed --num_accelerators 2 train.py --deepspeed_config ds_config.json
"""

import argparse
import time
from pathlib import Path

import deepspeed
import deepspeed.comm as dist
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from data import IGNORED, VOCABULARY_SIZE, MaskedText, read_text
from model import Encoder


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a Transformer encoder on masked language modelling.")
    parser.add_argument("--num_steps", type=int, default=1000, help="optimizer steps of the whole training")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--log_every", type=int, default=10, help="optimizer steps between two lines of the log")

    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq_length", type=int, default=64, help="bytes in a sample")
    parser.add_argument("--text_bytes", type=int, default=4_000_000, help="how much of the text to train on, at most")

    parser.add_argument("--checkpoint_dir", type=Path, default=Path("checkpoints"))
    parser.add_argument(
        "--save_every", type=int, default=0, help="optimizer steps between checkpoints; 0: one at the end"
    )
    parser.add_argument("--resume", action="store_true", help="resume from the latest checkpoint")

    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    return deepspeed.add_config_arguments(parser).parse_args()


def load_step(engine: deepspeed.DeepSpeedEngine, checkpoint_dir: Path) -> int:
    """Loads the latest checkpoint and returns the optimizer steps it has behind it."""
    path, client_state = engine.load_checkpoint(str(checkpoint_dir))
    if path is None:
        raise SystemExit(f"No checkpoint to resume from in {checkpoint_dir}.")
    return client_state["step"]


def main() -> None:
    args = parse_arguments()
    deepspeed.init_distributed()
    torch.manual_seed(args.seed)

    model = Encoder(VOCABULARY_SIZE, args.seq_length, args.hidden, args.layers, args.heads)
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    start = load_step(engine, args.checkpoint_dir) if args.resume else 0

    batch_size = engine.train_batch_size()
    loader = DataLoader(
        MaskedText(read_text(args.text_bytes), args.seq_length, args.seed),
        batch_size=engine.train_micro_batch_size_per_gpu(),
        # Every rank takes its share of each step's samples, from the first step that is still to do.
        sampler=range(start * batch_size + dist.get_rank(), args.num_steps * batch_size, dist.get_world_size()),
    )
    batches = iter(loader)

    engine.train()
    logged_step, logged_at = start, time.perf_counter()
    for step in range(start + 1, args.num_steps + 1):
        step_loss = torch.zeros((), device=engine.device)
        for _ in range(engine.gradient_accumulation_steps()):
            tokens, labels = (tensor.to(engine.device) for tensor in next(batches))
            logits = engine(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)
            engine.backward(loss)
            engine.step()
            step_loss += loss.detach() / engine.gradient_accumulation_steps()

        if step % args.log_every == 0 and dist.get_rank() == 0:
            loss_value = step_loss.item()  # waits for the device, so the clock is read after it
            now = time.perf_counter()
            samples_per_second = (step - logged_step) * batch_size / (now - logged_at)
            print(f"step {step} loss {loss_value:.6f} samples/s {samples_per_second:.1f}", flush=True)
            logged_step, logged_at = step, now
        if step == args.num_steps or (args.save_every and step % args.save_every == 0):
            engine.save_checkpoint(str(args.checkpoint_dir), tag=f"step{step}", client_state={"step": step})

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
