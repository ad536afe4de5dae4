"""Trainings whose experts are computed one after another, foreseen: the loop asks which tokens an expert has."""

import pytest
from case_fixtures import quick_first

from zerotune.trial_lib.messages.foreseen_run import OPERATIONS
from zerotune.trial_lib.plan.step_time import kind_of, step_of

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2},
}
TOKENS, EXPERTS, OF_A_TOKEN = 4096, 4, 2
PREAMBLE = """
import argparse

import deepspeed
import torch
from torch import nn
from torch.nn import functional

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
"""
TRAINING = f"""{PREAMBLE}

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, {EXPERTS})
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range({EXPERTS}))

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        y, rows = torch.zeros_like(x), []
        def compute(expert, tokens, weights):
            rows.append(len(tokens))
            y.index_add_(0, tokens, self.experts[expert](x[tokens]) * weights[:, None])
        self.loop(x, scores, compute)
        assert rows == [{{rows}}] * {EXPERTS}, rows
        return y

    def loop(self, x, scores, compute):
{{loop}}

model = Experts()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
while True:
    loss = engine(torch.ones({TOKENS}, 16, device=engine.device)).mean()
    engine.backward(loss)
    engine.step()
"""
MIXTRAL = f"""{PREAMBLE}
from transformers import MixtralConfig, MixtralForCausalLM

small = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4)
config = MixtralConfig(**small, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2, use_cache=False)
config._experts_implementation = "{{how}}"
model = MixtralForCausalLM(config)
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
while True:
    tokens = torch.ones(2, 32, dtype=torch.int64, device=engine.device)
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
"""
# As transformers, DeepSeek, Megatron, torchtitan and programs after their examples write it.
OF_SEVERAL = {
    "a mask for each expert": """
        weights, chosen = scores.topk(2, dim=-1)
        mask = functional.one_hot(chosen, num_classes=4).permute(2, 1, 0)
        for expert in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            place, tokens = torch.where(mask[expert].squeeze(0))
            compute(expert, tokens, weights[tokens, place])
""",
    "a comparison": """
        weights, chosen = torch.topk(scores, 2)
        for expert in range(4):
            tokens, place = torch.where(chosen == expert)
            if tokens.numel():
                compute(expert, tokens, weights[tokens, place])
""",
    "lengths of sorted tokens": """
        weights, chosen = scores.topk(2, sorted=False)
        order = chosen.view(-1).argsort()
        lengths = torch.bincount(chosen.view(-1), minlength=4).tolist()
        for expert, part in enumerate(order.split(lengths)):
            compute(expert, part // 2, weights.view(-1)[part])
""",
    "counted whole numbers": """
        weights, chosen = scores.topk(2)
        lengths = torch.histc(chosen.view(-1), bins=4, min=0, max=4).tolist()
        for expert, part in enumerate(chosen.view(-1).argsort(stable=True).split([int(each) for each in lengths])):
            compute(expert, part // 2, weights.view(-1)[part])
""",
    "written into zeros": """
        weights, chosen = scores.topk(2, dim=1)
        lengths = torch.zeros_like(scores).scatter(1, chosen, 1).long().sum(0).tolist()
        _, order = chosen.flatten().sort(0)
        for expert, part in enumerate(order.split(lengths)):
            compute(expert, part.div(2, rounding_mode="trunc"), weights.flatten()[part])
""",
    "written into zeros in place": """
        weights, chosen = scores.topk(2)
        counts = chosen.new_zeros((len(x), 4))
        counts.scatter_(1, chosen, 1)
        for expert, part in enumerate(chosen.view(-1).argsort().split(counts.sum(0).cpu().numpy().tolist())):
            compute(expert, part // 2, weights.view(-1)[part])
""",
    "a map of tokens": """
        weights, chosen = scores.topk(2)
        tokens_of = torch.zeros_like(scores).int().scatter(1, chosen, 1).bool().T.contiguous()
        everywhere = torch.arange(len(x), device=x.device).expand(4, -1)
        parts = everywhere.masked_select(tokens_of).split(tokens_of.sum(1).tolist())
        for expert, part in enumerate(parts):
            compute(expert, part, scores[part, expert])
""",
}
OF_SEVERAL["added ones"] = """
        weights, chosen = scores.topk(2)
        ones = torch.ones(len(x) * 2, dtype=torch.int64, device=x.device)
        lengths = torch.zeros(4, dtype=torch.int64, device=x.device).scatter_add_(0, chosen.view(-1), ones).tolist()
        for expert, part in enumerate(chosen.view(-1).argsort().split(lengths)):
            compute(expert, part // 2, weights.view(-1)[part])
"""
OF_ONE = {
    "the best of all": """
        chosen = torch.argmax(scores, dim=-1)
        for expert in functional.one_hot(chosen, num_classes=4).any(dim=0).nonzero().flatten().tolist():
            tokens = (chosen == expert).nonzero(as_tuple=True)[0]
            compute(expert, tokens, scores[tokens, expert])
""",
    "the largest and its place": """
        weights, chosen = scores.max(dim=1, keepdim=True)
        for expert in range(4):
            tokens, _ = torch.where(chosen == expert)
            compute(expert, tokens, weights[tokens, 0])
""",
}


@pytest.fixture
def foreseen(foresee_text):
    return lambda text: foresee_text(text, CONFIG)


@pytest.mark.parametrize("name", quick_first(3, [*OF_SEVERAL, *OF_ONE]))
def test_each_expert_gets_equally_many_tokens(foreseen, name):
    of_a_token = OF_A_TOKEN if name in OF_SEVERAL else 1
    loop = {**OF_SEVERAL, **OF_ONE}[name]
    run = foreseen(TRAINING.format(loop=loop, rows=TOKENS * of_a_token // EXPERTS))
    assert run.stopped == ""
    (choice,) = [each for each in run.asks if "train.py" in each.asker]
    # It is a guess, and the reader is told so.
    assert (choice.answer, choice.is_known) == (f"each of {EXPERTS} equally often", False)


@pytest.mark.long
def test_experts_in_a_loop_work_as_much_as_experts_computed_at_once(foreseen):
    work = {}
    for how in ("eager", "grouped_mm"):
        run = foreseen(MIXTRAL.format(how=how))
        assert run.stopped == ""
        work[how] = sum(each.flops for each in run.operations if OPERATIONS[each.kind] == "matmul")
    assert work["eager"] == work["grouped_mm"]


SHARED = f"""{PREAMBLE}
from torch import distributed as dist

deepspeed.init_distributed()
model = nn.Linear(16, {EXPERTS})
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
while True:
    weights, chosen = engine(torch.ones({TOKENS}, 16, device=engine.device)).topk(2)
    counts = torch.bincount(chosen.flatten(), minlength={EXPERTS})
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    of_each = theirs.view(dist.get_world_size(), -1).sum(0).tolist()
    assert of_each == [{TOKENS}] * ({EXPERTS} // dist.get_world_size()), of_each
    parts = [torch.empty_like(part) for part in counts.chunk(dist.get_world_size())]
    dist.all_to_all(parts, list(counts.chunk(dist.get_world_size())))
    assert torch.stack(parts).sum(0).tolist() == of_each
    engine.backward(weights.mean())
    engine.step()
"""


def test_experts_that_ranks_share_get_the_tokens_of_all_ranks(foreseen):
    assert foreseen(SHARED).stopped == ""


DEEPSPEED = f"""{PREAMBLE}
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

deepspeed.init_distributed()
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 16)
        self.moe = MoE(hidden_size=16, expert=nn.Linear(16, 16), num_experts={EXPERTS}, ep_size=2)

    def forward(self, x):
        return self.moe(self.up(x))[0]

model = Model()
groups = split_params_into_different_moe_groups_for_optimizer({{"params": list(model.parameters()), "name": "all"}})
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=groups)
while True:
    engine.backward(engine(torch.ones(2, 8, 16, device=engine.device)).mean())
    engine.step()
"""


def test_experts_on_other_ranks_count_among_the_parameters(foreseen):
    run = foreseen(DEEPSPEED)
    assert run.stopped == ""
    layer = 16 * 16 + 16
    assert run.parameters == run.trainable == layer + EXPERTS * layer + EXPERTS * 16


AUTOEP = f"""{PREAMBLE}
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
heads = dict(q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16)
experts = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, n_group=2, topk_group=1)
config = DeepseekV3Config(**sizes, **heads, **experts, num_key_value_heads=4, first_k_dense_replace=1, use_cache=False)
model = DeepseekV3ForCausalLM(config)
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
while True:
    tokens = torch.ones(2, 64, dtype=torch.int64, device=engine.device)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
"""


def test_experts_that_autoep_divides_exchange_the_tokens_that_each_is_chosen_for(foresee_text):
    more = {"bf16": {"enabled": True}, "expert_parallel": {"enabled": True, "autoep_size": 2}}
    run = foresee_text(AUTOEP, {**CONFIG, **more})
    assert run.stopped == ""
    for stretch in step_of(run).last:
        exchanged = [each.moved for each in stretch.operations if kind_of(each) == "all_to_all" and each.moved > 16]
        # In the only layer with experts each of 128 tokens of 64 numbers goes to two of them, and comes back.
        assert exchanged == [2 * 128 * 64 * 2] * 2 * (stretch.moment in ("forward", "backward"))


UNUSED = f"""{PREAMBLE}
model = nn.Linear(16, 16)
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
while True:
    x = engine(torch.ones({TOKENS}, 16, device=engine.device))
    loss = (x - x.max(-1, keepdim=True)[0]).exp().mean()
    # The classes of an image's points are no experts.
    image = x.reshape(4, 16, 32, 32)
    assert (image.argmax(1) == 1).sum().item() == 0
    engine.backward(loss)
    engine.step()
"""


def test_a_choice_that_nobody_uses_and_one_of_an_image_are_no_routing(foreseen):
    run = foreseen(UNUSED)
    assert run.stopped == ""
    assert {each.question for each in run.asks if "train.py" in each.asker} == {"item"}


MANY = f"""{PREAMBLE}
model = nn.Linear(16, 128)
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
while True:
    weights, chosen = engine(torch.ones({4 * TOKENS}, 16, device=engine.device)).topk(8)
    mask = functional.one_hot(chosen, num_classes=128).permute(2, 1, 0)
    assert [len(torch.where(each)[0]) for each in mask] == [{4 * TOKENS} * 8 // 128] * 128
    engine.backward(weights.mean())
    engine.step()
"""


@pytest.mark.long
def test_the_masks_of_many_tokens_and_experts_are_known(foreseen):
    assert foreseen(MANY).stopped == ""


def test_a_choice_by_computed_numbers_is_still_a_sentence_with_the_line(foreseen):
    chooses = "        tokens = (scores[:, 0] > 0.5).nonzero().flatten()\n        compute(0, tokens, scores[tokens, 0])"
    run = foreseen(TRAINING.format(loop=chooses, rows=0))
    assert "nonzero's result depends on numbers that only a real run has, at" in run.stopped
    assert "train.py" in run.stopped


def test_zeros_that_the_program_has_written_to_are_unknown(foreseen):
    writes = """
        weights, chosen = scores.topk(2)
        counts = torch.zeros(len(x), 4, device=x.device)
        counts += scores.detach()
        for expert, length in enumerate(counts.scatter(1, chosen, 1).long().sum(0).tolist()):
            assert length == 0
            compute(expert, chosen[:, 0], weights[:, 0])
    """
    run = foreseen(TRAINING.format(loop=writes, rows=TOKENS))
    assert run.stopped == ""
    assert [each.question for each in run.asks if not each.is_known] == ["item"]
