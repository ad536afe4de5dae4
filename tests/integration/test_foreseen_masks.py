"""A model of transformers is foreseen with the masks that it has when it runs, so with the same attention kernels."""

import json
import subprocess
import sys

import pytest

from zerotune.trial_lib.plan.devices import Cluster, known_devices
from zerotune.trial_lib.plan.fits import by_size
from zerotune.trial_lib.plan.step_time import planned_step

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 1},
}
# One batch of each kind goes through each model. A mask is of no, some or all samples, and texts are packed into one.
MODELS = """
import sys

import torch
import transformers
from torch.nn import functional

size = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=64, head_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)
of_gpt = dict(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=64)
encoder = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
experts = dict(num_local_experts=4, num_experts_per_tok=2)
CONFIGURATIONS = {
    "llama": lambda: transformers.LlamaConfig(**size),
    "mistral, a window": lambda: transformers.MistralConfig(**size, sliding_window=8),
    "qwen2": lambda: transformers.Qwen2Config(**size),
    "gemma3, windows in turn": lambda: transformers.Gemma3TextConfig(
        **size, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "mixtral": lambda: transformers.MixtralConfig(**size, **experts),
    "gpt2": lambda: transformers.GPT2Config(**of_gpt),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, ffn_dim=32, num_attention_heads=2, word_embed_proj_dim=32
    ),
    "bert": lambda: transformers.BertConfig(**encoder),
    "bart": lambda: transformers.BartConfig(
        vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32
    ),
}
BATCHES = {
    "no mask": lambda ids: {},
    "a mask of ones": lambda ids: {"attention_mask": torch.ones_like(ids)},
    "padding": lambda ids: {"attention_mask": (torch.arange(16) < torch.tensor([[16], [9]])).long()},
    "positions": lambda ids: {"position_ids": torch.arange(16).expand(2, 16)},
    "packed": lambda ids: {"position_ids": torch.cat([torch.arange(9), torch.arange(7)]).expand(2, 16)},
}


def masks_on(device):
    seen, original = [], functional.scaled_dot_product_attention

    def noted(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **more):
        mask = None if attn_mask is None else [list(attn_mask.shape), str(attn_mask.dtype)]
        seen.append([mask, bool(is_causal), list(query.shape), list(key.shape)])
        return original(query, key, value, attn_mask, dropout_p, is_causal, **more)

    functional.scaled_dot_product_attention = torch.nn.functional.scaled_dot_product_attention = noted
    ids = torch.arange(32).reshape(2, 16) + 3
    found = {}
    for name, configuration in CONFIGURATIONS.items():
        kind = transformers.AutoModel if name in ("bert", "bart") else transformers.AutoModelForCausalLM
        model = kind.from_config(configuration(), attn_implementation="sdpa").to(device, torch.bfloat16)
        for batch, more in BATCHES.items():
            if "position_ids" in more(ids) and name in ("opt", "bert", "bart"):
                continue
            given = {"input_ids": ids, **more(ids)}
            model(**{key: value.to(device) for key, value in given.items()}, use_cache=False)
            found[f"{name}, {batch}"] = list(seen)
            seen.clear()
    functional.scaled_dot_product_attention = torch.nn.functional.scaled_dot_product_attention = original
    return found
"""
AND_TRAIN = """
import json

import deepspeed

expected = json.load(open("expected.json"))
model = torch.nn.Linear(8, 1)
engine, *_ = deepspeed.initialize(config="ds_config.json", model=model, model_parameters=model.parameters())
found = json.loads(json.dumps(masks_on(engine.device)))
different = {name: [found[name], masks] for name, masks in expected.items() if found[name] != masks}
assert not different, json.dumps(different)
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
        num_key_value_heads=8, max_position_embeddings=length,
    )
)
engine, *_ = deepspeed.initialize(config="ds_config.json", model=model, model_parameters=model.parameters())
ids = torch.ones(1, length, dtype=torch.long, device=engine.device)
while True:
    engine.backward(engine(input_ids=ids, labels=ids{mask}).loss)
    engine.step()
"""


@pytest.fixture
def real(tmp_path):
    (tmp_path / "plain.py").write_text(MODELS + "\nimport json\nprint(json.dumps(masks_on('cpu')))\n")
    done = subprocess.run([sys.executable, "plain.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_models_have_the_masks_of_a_real_run(real, foresee_text, tmp_path):
    assert real["llama, a mask of ones"][0][:2] == [None, True]
    assert real["llama, padding"][0][0] is not None
    (tmp_path / "expected.json").write_text(json.dumps(real))
    assert foresee_text(MODELS + AND_TRAIN, CONFIG).stopped == ""


def test_a_mask_of_ones_changes_neither_bytes_nor_speed(foresee_text):
    cluster = Cluster(device=known_devices()["h100-80gb"], hosts=1, per_host=2)
    config = {**CONFIG, "train_micro_batch_size_per_gpu": 1}
    found = []
    for mask in ("", ", attention_mask=torch.ones_like(ids)"):
        run = foresee_text(LONG.replace("{mask}", mask), config)
        assert run.stopped == ""
        found.append((by_size(run, None).at(1).peak, planned_step(run, cluster).seconds))
    (without, seconds), (with_ones, seconds_with_ones) = found
    # The mask itself has a few bytes for each token, and a mask of queries by keys has 256 MiB.
    assert abs(with_ones - without) < 2**20
    assert seconds_with_ones == pytest.approx(seconds, rel=0.005)
