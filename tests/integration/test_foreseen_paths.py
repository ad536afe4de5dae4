"""A foreseen program takes the path of a real run: the same operators in the same order, and the same masks.

`python -m benchmarks.foresee.paths` compares the programs of the repository. Its table is
benchmarks/results/foreseen_paths.json.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

from benchmarks.foresee import path_recorder
from benchmarks.foresee.paths import RESULT
from zerotune.trial_lib.plan.devices import Cluster, Efficiencies, known_devices
from zerotune.trial_lib.plan.fits import by_size
from zerotune.trial_lib.plan.step_time import planned_step

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 1},
}
# Batches of each kind go through each model. A mask is of no, some or all samples, and texts are packed into one.
MODELS = """
import path_recorder
import torch
import transformers

size = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=64, head_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)
of_gpt = dict(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=64)
plain = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
of_bart = dict(
    vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
)
windows = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"])
CONFIGURATIONS = {
    "llama": lambda: transformers.LlamaConfig(**size),
    "mistral": lambda: transformers.MistralConfig(**size, sliding_window=8),
    "qwen2": lambda: transformers.Qwen2Config(**size),
    "qwen3": lambda: transformers.Qwen3Config(**size),
    "gemma3": lambda: transformers.Gemma3TextConfig(**size, **windows),
    "mixtral": lambda: transformers.MixtralConfig(**size, num_local_experts=4, num_experts_per_tok=2),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**plain),
    "gpt2": lambda: transformers.GPT2Config(**of_gpt),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, ffn_dim=32, num_attention_heads=2, word_embed_proj_dim=32
    ),
    "bert": lambda: transformers.BertConfig(**plain, attention_probs_dropout_prob=0.0),
    "bart": lambda: transformers.BartConfig(**of_bart),
    "t5": lambda: transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
    ),
}
BATCHES = {
    "no mask": lambda ids: {},
    "a mask of ones": lambda ids: {"attention_mask": torch.ones_like(ids)},
    "padding": lambda ids: {"attention_mask": (torch.arange(16) < torch.tensor([[16], [9]])).long()},
    "positions": lambda ids: {"position_ids": torch.arange(16).expand(2, 16)},
    "packed": lambda ids: {"position_ids": torch.cat([torch.arange(9), torch.arange(7)]).expand(2, 16)},
}
WITHOUT_POSITIONS = ("opt", "bert", "bart", "t5")
KINDS = {"bert": "AutoModelForMaskedLM", "bart": "AutoModelForSeq2SeqLM", "t5": "AutoModelForSeq2SeqLM"}


def path(device):
    ids = torch.arange(32).reshape(2, 16) + 3
    for name in CHOSEN:
        for attention in ("sdpa", "eager") if name != "t5" else ("eager",):
            kind = getattr(transformers, KINDS.get(name, "AutoModelForCausalLM"))
            model = kind.from_config(CONFIGURATIONS[name](), attn_implementation=attention)
            model = model.to(device, torch.bfloat16).train()
            for batch, more in BATCHES.items():
                if "position_ids" in more(ids) and name in WITHOUT_POSITIONS:
                    continue
                given = {"input_ids": ids, "labels": ids, **more(ids)}
                if name in ("bart", "t5"):
                    # Else a number is written into a tensor, which a CPU fills without an operator for the number.
                    given["decoder_input_ids"] = ids
                given = {key: value.to(device) for key, value in given.items()}
                # Nobody knows which experts a router chooses. So that model's masks are compared alone.
                only = "scaled_dot_product_attention" if name == "mixtral" else ""
                with path_recorder.noting(f"{name}, {attention}, {batch}", only):
                    model(**given, use_cache=False).loss.backward()


path_recorder.replace_kernels()
path(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
path_recorder.finish()
"""
# What code asks to find out whether it is traced.
QUESTIONS = """
import json

import torch
import transformers.utils.import_utils as asked
from deepspeed.runtime import compiler
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import is_fake

model = torch.nn.Linear(8, 1)
model.to("cuda" if torch.cuda.is_available() else "cpu")
tensor = model(torch.ones(2, 8, device=model.weight.device))
answers = [
    isinstance(tensor, FakeTensor), isinstance(tensor, FakeTensor | torch.fx.Proxy), is_fake(tensor),
    isinstance(tensor, torch._subclasses.fake_tensor.FakeTensor), torch.compiler.is_compiling(),
    torch.compiler.is_dynamo_compiling(), torch.compiler.is_exporting(), torch._dynamo.is_compiling(),
    torch.jit.is_tracing(), torch.jit.is_scripting(), torch.fx._symbolic_trace.is_fx_tracing(),
    torch.overrides.has_torch_function((tensor,)), asked.is_tracing(tensor), asked.is_torchdynamo_compiling(),
    compiler.is_compiling(), torch.is_tensor(tensor), isinstance(model.weight, torch.nn.Parameter),
    torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor),
]
"""
# What CUDA computes by one kernel, and torch takes apart on a device that it does not know.
KERNELS = """
import path_recorder
import torch
from torch.nn import functional

with path_recorder.noting("kernels"):
    x = torch.ones(2, 8, 16, device="cuda", requires_grad=True)
    weight = torch.ones(16, device="cuda", requires_grad=True)
    layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(16, 16).to("cuda"))
    outs = [
        functional.silu(x), functional.mish(x), functional.gelu(x), functional.dropout(x, 0.1), functional.hardswish(x),
        functional.layer_norm(x, (16,), weight), functional.group_norm(x, 2), functional.softmax(x, -1), layer(x),
        functional.rms_norm(x, (16,), weight),
    ]
    sum(each.sum() for each in outs).backward()
names = {call.split()[0] for call in path_recorder._paths["kernels"]}
missing = {
    "silu_backward", "mish_backward", "gelu_backward", "native_dropout", "native_dropout_backward",
    "hardswish_backward", "native_layer_norm_backward", "native_group_norm_backward", "_softmax_backward_data",
    "_weight_norm_interface",
} - names
assert not missing, missing
assert not {"sigmoid", "bernoulli_", "rsqrt", "tanh"} & names, names
optimizer = torch.optim.AdamW([x, weight])
with path_recorder.noting("update"):
    torch.nn.utils.clip_grad_norm_([x, weight], 1.0)
    optimizer.step()
names = {call.split()[0] for call in path_recorder._paths["update"]}
assert {"_foreach_norm", "_foreach_mul_", "_foreach_sqrt", "_foreach_addcdiv_"} <= names, names
"""
AND_TRAIN = """
import deepspeed

model = torch.nn.Linear(8, 1)
engine, *_ = deepspeed.initialize(config="ds_config.json", model=model, model_parameters=model.parameters())
while True:
    engine.backward(engine(torch.ones(2, 8, device=engine.device, dtype=torch.bfloat16)).mean())
    engine.step()
"""
LONG = """
import deepspeed
import torch
import transformers

length = 16384
model = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
        vocab_size=256, hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=length, attn_implementation="{kernel}",
    )
)
engine, *_ = deepspeed.initialize(config="ds_config.json", model=model, model_parameters=model.parameters())
ids = torch.ones(1, length, dtype=torch.long, device=engine.device)
while True:
    engine.backward(engine(input_ids=ids, labels=ids{mask}).loss)
    engine.step()
"""


@pytest.fixture
def run_really(tmp_path):
    def run(text: str) -> str:
        shutil.copy(path_recorder.__file__, tmp_path)
        (tmp_path / "plain.py").write_text(text)
        command = [sys.executable, "plain.py"]
        environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.long
def test_a_model_of_transformers_has_the_operators_of_a_real_run(run_really, foresee_text, tmp_path):
    text = "CHOSEN = ['llama', 'gemma3', 'bert']" + MODELS
    run_really(text)
    parts = json.loads((tmp_path / path_recorder.FILE).read_text())
    first = {name: next((call for call in calls if call.startswith("scaled")), "") for name, calls in parts.items()}
    assert "attn_mask" not in first["llama, sdpa, a mask of ones"]
    assert "attn_mask" in first["llama, sdpa, padding"]
    # Without a mask and with as many heads of keys, both have the same kernel, forward and backward.
    flash = [call.split(" bfloat")[0] for call in parts["bert, sdpa, no mask"] if call.startswith("flash")]
    assert flash == ["flash attention, forward", "flash attention, backward"]
    assert foresee_text(text + AND_TRAIN, CONFIG).stopped == ""


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    ["mistral", "qwen2", "qwen3", "mixtral", "gpt_neox", "gpt2", "opt", "t5", "bart"],
)
def test_each_architecture_has_the_operators_of_a_real_run(run_really, foresee_text, name):
    text = f"CHOSEN = ['{name}']" + MODELS
    run_really(text)
    assert foresee_text(text + AND_TRAIN, CONFIG).stopped == ""


@pytest.mark.long
def test_another_path_than_the_real_one_is_found(run_really, foresee_text):
    text = "CHOSEN = ['qwen2']" + MODELS
    run_really(text.replace("torch.ones_like(ids)", "torch.ones_like(ids).tril()"))
    stopped = foresee_text(text + AND_TRAIN, CONFIG).stopped
    assert "qwen2, sdpa, a mask of ones: operator" in stopped


@pytest.mark.long
def test_code_that_asks_whether_it_is_traced_gets_the_answers_of_a_real_run(run_really, foresee_text):
    answers = json.loads(run_really(QUESTIONS + "print(json.dumps(answers))").splitlines()[-1])
    assert foresee_text(QUESTIONS + f"assert answers == {answers}, answers" + AND_TRAIN, CONFIG).stopped == ""


def test_no_kernel_of_cuda_is_taken_apart(foresee_text, tmp_path):
    shutil.copy(path_recorder.__file__, tmp_path)
    assert foresee_text(KERNELS + AND_TRAIN, CONFIG).stopped == ""


def test_no_program_of_the_repository_takes_another_path():
    table = json.loads(RESULT.read_text())
    assert {name: row for name, row in table.items() if row.get("differs")} == {}
    assert sum("operators" in row for row in table.values()) > 20


@pytest.mark.long
@pytest.mark.parametrize("kernel", ["sdpa", "flash_attention_2"])
def test_a_mask_of_ones_changes_neither_bytes_nor_speed(foresee_text, kernel):
    cluster = Cluster(device=known_devices()["h100-80gb"], hosts=1, per_host=2)
    config = {**CONFIG, "train_micro_batch_size_per_gpu": 1}
    found = []
    for mask in ("", ", attention_mask=torch.ones_like(ids)"):
        run = foresee_text(LONG.replace("{mask}", mask).replace("{kernel}", kernel), config)
        assert run.stopped == ""
        found.append((by_size(run, None).at(1).peak, planned_step(run, cluster).seconds))
    (without, seconds), (with_ones, seconds_with_ones) = found
    # The mask itself has a few bytes for each token, and a mask of queries by keys has 256 MiB.
    assert abs(with_ones - without) < 2**20
    # The host asks four times what the mask has. Attention with a mask takes milliseconds more.
    assert seconds_with_ones - seconds == pytest.approx(4 * Efficiencies().launch.value, rel=0.1)
