"""A foreseen program may write its device in each way that torch knows. All of them mean the pretended one."""

import json

import pytest
from foreseen_fixtures import program_named

from zerotune.trial_lib.messages.foreseen_run import OPERATIONS, PLACES
from zerotune.trial_lib.plan.simulation import Pretended, simulate, starter_for
from zerotune.trial_lib.plan.step_time import step_of

_PROGRAM = """
import argparse
import pickle
import tempfile

import deepspeed
import torch
from torch import nn, zeros
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=0)
arguments = parser.parse_args()
seen, here = [], torch.device("cuda", 0)
file = f"{tempfile.mkdtemp()}/weights.pt"
torch.save({"weight": torch.ones(4)}, file)
assert torch.load(file)["weight"].device == torch.device("cpu")


@torch.jit.script
def scripted(x):
    return torch.tensor([1.0], device=x.device) + torch.zeros([1], device=x.device)


def tensors(x):
    yield x.to("cuda").to(device="cuda:0").to("cuda", torch.float32).to(here)
    yield torch.zeros(4).cuda()
    yield torch.zeros(4, device="cuda")
    yield torch.arange(4, device=here)
    yield zeros(4, device="cuda")
    yield torch.zeros_like(torch.zeros(4), device="cuda")
    yield torch.zeros(4).new_zeros(4, device="cuda:0")
    yield torch.zeros(4).new_tensor([1.0], device="cuda")
    yield torch.tensor([1.0, 2.0], device="cuda")
    yield torch.tensor([1.0, 2.0], pin_memory=True).to("cuda", non_blocking=True)
    yield torch.as_tensor([1.0, 2.0], device="cuda")
    yield torch.asarray([1.0, 2.0], device="cuda")
    yield torch.fft.fftfreq(4, device="cuda")
    yield torch.signal.windows.hann(4, device="cuda")
    yield torch.normal(0.0, 1.0, (4,), device="cuda")
    yield torch.randn(4, device="cuda", generator=torch.Generator(device="cuda"))
    yield torch.randn(4, generator=torch.Generator(engine.device)).to("cuda")
    yield torch.ops.aten.zeros([4], device="cuda")
    yield scripted(x)
    with torch.device("cuda"):
        yield torch.zeros(4)
        yield torch.tensor([1.0])
        yield nn.Linear(4, 4).weight
    moved = torch.zeros(4)
    moved.data = moved.data.to("cuda")
    yield moved
    yield nn.Linear(4, 4, device="cuda").weight
    yield nn.Linear(4, 4).to("cuda").weight
    yield torch.cuda.FloatTensor([1.0, 2.0])
    yield torch.cuda.LongTensor(4)
    yield torch.zeros(4).type(torch.cuda.HalfTensor)
    yield torch.zeros(4).type("torch.cuda.HalfTensor")
    for where in ("cuda", here, {"cpu": "cuda:0"}):
        yield torch.load(file, map_location=where)["weight"]


def casts(x):
    weight = torch.zeros(4, 8, device="cuda")
    lower = torch.autocast("cuda", dtype=torch.bfloat16)
    with lower:
        assert torch.is_autocast_enabled() and torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") == torch.get_autocast_gpu_dtype() == torch.bfloat16
        yield x @ weight.t(), torch.bfloat16
    yield lower(nn.functional.linear)(x, weight), torch.bfloat16
    yield x @ weight.t(), torch.float32
    with torch.autocast("cuda"):
        yield x @ weight.t(), torch.float16
    with torch.cuda.amp.autocast(dtype=torch.bfloat16):
        yield x @ weight.t(), torch.bfloat16
        yield InFull.apply(x.bfloat16()), torch.float32


class InFull(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, x):
        return x * 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return checkpoint(self.part, x, use_reentrant=False)

    def part(self, x):
        seen.append({each.device for each in tensors(x)})
        wrong = [(number, made.dtype) for number, (made, wanted) in enumerate(casts(x)) if made.dtype != wanted]
        assert not wrong, wrong
        heads = self.layer(x).to(torch.bfloat16).view(4, 1, 1, 8)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads).view(4, 8).float()


model = Model()
engine, *_ = deepspeed.initialize(args=arguments, model=model, model_parameters=model.parameters())
assert isinstance(torch.default_generator, torch.Generator)
assert isinstance(pickle.loads(pickle.dumps(torch.Generator())), torch.Generator)
pinned = torch.zeros(1024, device=engine.device).new_zeros(2048, device="cpu", pin_memory=True)
assert pinned.is_pinned()
number = torch.zeros(1, device="cuda", dtype=torch.half)
assert number.type() == "torch.cuda.HalfTensor" and torch.ones(1).type() == "torch.FloatTensor"
assert isinstance(number, torch.cuda.HalfTensor) and not isinstance(number, torch.cuda.FloatTensor)
pins = DataLoader(range(4), batch_size=4, collate_fn=lambda each: torch.zeros(4, pin_memory=True))
assert next(iter(pins)).shape == (4,)
torch.set_default_device("cuda")
for _ in range(2):
    before = len(seen)
    x = torch.randn(4, 8)
    engine.backward(engine(x).pow(2).mean())
    assert len(seen) == before + 2, "once in the forward pass, and again in the backward pass"
    assert seen[-1] == seen[-2] == {engine.device}, seen
    engine.step()
"""


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 3])
def test_each_way_to_write_a_device_means_the_pretended_one(tmp_path, stage):
    (tmp_path / "train.py").write_text(_PROGRAM)
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    (tmp_path / "ds_config.json").write_text(json.dumps({**config, "zero_optimization": {"stage": stage}}))
    program = program_named("train.py", "--deepspeed_config", "ds_config.json", folder=tmp_path)
    starter = starter_for(program, tmp_path / "server", print)
    try:
        run = simulate(program, {}, Pretended(world=2, ranks_per_host=2), tmp_path / "run", starter, deadline_s=120.0)
    finally:
        starter.close()
    assert run.stopped == ""
    # Parts that run again in the backward pass take the same kernel.
    of_attention = [
        sum(OPERATIONS[one.kind].endswith("attention") for one in each.operations)
        for each in step_of(run).last
        if each.moment in ("forward", "backward")
    ]
    assert of_attention == [1, 2]
    assert [each.size for each in run.storages if PLACES[each.place] == "pinned"].count(8192) == 1
