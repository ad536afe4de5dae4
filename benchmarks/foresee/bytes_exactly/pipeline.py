"""A pipeline of equal blocks. A rank builds the blocks of its own stage alone.

Ranks of tensor parallelism have the same blocks here, and divide the tensors that stages send to each other.
"""

import argparse
from collections.abc import Iterator

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

WIDTH, TOKENS, BLOCKS = 256, 64, 8

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--stages", type=int, required=True)
args = deepspeed.add_config_arguments(parser).parse_args()


class Block(nn.Module):
    """A feed-forward block with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the shape of the given one, (samples, tokens, width)."""
        return hidden + self.down(F.gelu(self.up(hidden)))


def batches(samples: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields inputs and targets without end."""
    while True:
        yield torch.randn(samples, TOKENS, WIDTH), torch.randn(samples, TOKENS, WIDTH)


deepspeed.init_distributed()
slices = deepspeed.comm.get_world_size() // args.stages
model = PipelineModule(
    [LayerSpec(Block) for _ in range(BLOCKS)],
    topology=PipeModelDataParallelTopology(num_pp=args.stages, num_mp=slices, num_dp=1),
    loss_fn=F.mse_loss,
    partition_method="uniform",
)
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
data = batches(engine.train_micro_batch_size_per_gpu())
while True:
    engine.train_batch(data)
