"""Rolls out texts with a small actor, rewards them, and trains the actor on them. Its flags make DeepSpeed's JSON."""

import argparse

import deepspeed
import torch
from torch import nn

VOCABULARY, WIDTH, PROMPT = 64, 32, 8

parser = argparse.ArgumentParser()
parser.add_argument("--rollout_batch_size", type=int, default=1024)
parser.add_argument("--micro_rollout_batch_size", type=int, default=8)
parser.add_argument("--train_batch_size", type=int, default=128)
parser.add_argument("--micro_train_batch_size", type=int, default=4)
parser.add_argument("--max_len", type=int, default=64)
parser.add_argument("--num_episodes", type=int, default=100)
parser.add_argument("--zero_stage", type=int, default=2)
parser.add_argument("--actor_learning_rate", type=float, default=1e-6)
parser.add_argument("--adam_offload", action="store_true", default=False)
parser.add_argument("--bf16", action="store_true", default=False)
args = parser.parse_args()
deepspeed.init_distributed()
torch.manual_seed(3)


class Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.mix(self.embed(tokens))[0])

    @torch.no_grad()
    def generate(self, tokens: torch.Tensor) -> torch.Tensor:
        while tokens.shape[1] < args.max_len:
            chances = self(tokens)[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1)], 1)
        return tokens


offload = {"device": "cpu" if args.adam_offload else "none"}
engine, *_ = deepspeed.initialize(
    model=(actor := Actor()),
    model_parameters=actor.parameters(),
    config={
        "train_batch_size": args.train_batch_size,
        "train_micro_batch_size_per_gpu": args.micro_train_batch_size,
        "optimizer": {"type": "Adam", "params": {"lr": args.actor_learning_rate, "torch_adam": True}},
        "zero_optimization": {"stage": args.zero_stage, "offload_optimizer": offload},
        "bf16": {"enabled": args.bf16},
        "gradient_clipping": 1.0,
    },
)
micro = engine.train_micro_batch_size_per_gpu()
print("engine", micro, engine.gradient_accumulation_steps(), engine.train_batch_size(), flush=True)
draws = torch.Generator().manual_seed(torch.distributed.get_rank())
own = args.rollout_batch_size // torch.distributed.get_world_size()
for _ in range(args.num_episodes):
    texts = []
    for _ in range(own // args.micro_rollout_batch_size):
        prompts = torch.randint(VOCABULARY, (args.micro_rollout_batch_size, PROMPT), generator=draws)
        texts.append(engine.module.generate(prompts.to(engine.device)))
    experience = torch.cat(texts)
    rewards = (experience[:, PROMPT:] % 2 == 0).float().mean(1)
    advantages = rewards - rewards.mean()
    for start in range(0, own, args.micro_train_batch_size):
        tokens = experience[start : start + args.micro_train_batch_size]
        chosen = engine(tokens[:, :-1]).log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)[:, PROMPT - 1 :]
        engine.backward(-(advantages[start : start + args.micro_train_batch_size, None] * chosen).mean())
        engine.step()
