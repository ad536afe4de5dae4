"""The training of a public row, as a user would write it: `python row_training.py PROGRAM.json`.

The file holds a `RowProgram`. ZeroTune runs the program as it runs any other.
"""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
from divided import Divided

STEPS = 2


def hugging_face_model(program: Any) -> torch.nn.Module:
    """Returns the model of a row whose source used `transformers`."""
    import transformers

    sizes = {
        "vocab_size": program.vocab,
        "hidden_size": program.hidden,
        "num_hidden_layers": program.layers,
        "num_attention_heads": program.heads,
        "attn_implementation": "eager" if program.attention == "eager" else "sdpa",
        "use_cache": False,
    }
    names = {
        "llama": "Llama",
        "qwen2": "Qwen2",
        "falcon": "Falcon",
        "gpt_neox": "GPTNeoX",
        "gpt2": "GPT2",
        "gpt_bigcode": "GPTBigCode",
        "opt": "OPT",
    }
    tied = {"tie_word_embeddings": program.is_tied}
    longest = {"max_position_embeddings": program.tokens}
    gated = {"intermediate_size": program.ffn, "num_key_value_heads": program.kv_heads, **longest, **tied}
    own = {
        "llama": gated,
        "qwen2": gated,
        "falcon": {"multi_query": program.kv_heads == 1, "parallel_attn": True, "alibi": False},
        "gpt_neox": {"intermediate_size": program.ffn, **longest},
        "gpt2": {"n_inner": program.ffn, "n_positions": program.tokens},
        "gpt_bigcode": {
            "n_inner": program.ffn,
            "n_positions": program.tokens,
            "multi_query": program.kv_heads == 1,
        },
        "opt": {"ffn_dim": program.ffn, "word_embed_proj_dim": program.hidden, **longest},
    }
    family = names[program.family]
    config = getattr(transformers, f"{family}Config")(**sizes, **own[program.family])
    if program.loss != "full":
        base = getattr(transformers, f"{family}Model")(config)
        if program.checkpoints:
            base.gradient_checkpointing_enable()
        return _WithOwnHead(base, program)
    model = getattr(transformers, f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(config)
    if program.checkpoints:
        model.gradient_checkpointing_enable()
    return model


class _WithOwnHead(torch.nn.Module):
    """A model with another output than all logits: one value for each token, or a loss by parts."""

    def __init__(self, base: torch.nn.Module, program: Any) -> None:
        super().__init__()
        self.base, self.kind = base, program.loss
        self.head = torch.nn.Linear(program.hidden, 1 if self.kind == "value head" else program.vocab, bias=False)
        if self.kind == "half":
            self.head.weight = base.get_input_embeddings().weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        states = self.base(input_ids=input_ids).last_hidden_state
        if self.kind == "value head":
            return self.head(states).float().mean()
        if self.kind == "half":
            # As GPT-2 had it, with a copy of the logits without the last token's.
            logits, labels = self.head(states)[:, :-1].contiguous(), input_ids[:, 1:].contiguous()
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        from decoder import LossInPlace, loss_in_chunks

        if "in place" in self.kind:
            logits = self.head(states)
            return LossInPlace.apply(logits.float() if self.kind == "wide in place" else logits, input_ids)
        return loss_in_chunks(states, self.head.weight, input_ids, keeps_logits=self.kind == "chunked")


class _WithAdapter(torch.nn.Module):
    """A linear layer with an adapter of low rank beside it (Hu et al., LoRA, arXiv 2106.09685)."""

    def __init__(self, linear: torch.nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear
        self.right = torch.nn.Parameter(torch.zeros(linear.in_features, rank))
        self.left = torch.nn.Parameter(torch.zeros(rank, linear.out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + x @ self.right @ self.left


class _OfFewBits(torch.autograd.Function):
    """A product with a weight of 4 bits, which is copied into 16 bits in both passes and keeps no input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Any) -> torch.Tensor:
        ctx.layer = layer
        return torch.nn.functional.linear(x, layer.copied(x))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradients[0] @ ctx.layer.copied(gradients[0]), None


class _Quantized(torch.nn.Linear):
    """A linear layer with weights of 4 bits, two bytes of which are one number of its parameter."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, None
        count = linear.in_features * linear.out_features
        # A byte for the scale of 64.
        self.weight = torch.nn.Parameter(torch.zeros(count // 4 + count // 128, 1), requires_grad=False)

    def copied(self, like: torch.Tensor) -> torch.Tensor:
        """Returns the weight in 16 bits."""
        return like.new_empty(self.out_features, self.in_features)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the product."""
        return _OfFewBits.apply(input, self)


def _quantize(module: torch.nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, torch.nn.Linear):
            setattr(module, name, _Quantized(child))
        else:
            _quantize(child)


def _add_adapters(module: torch.nn.Module, rank: int) -> None:
    for name, child in module.named_children():
        if isinstance(child, torch.nn.Linear):
            setattr(module, name, _WithAdapter(child, rank))
        else:
            _add_adapters(child, rank)


def with_adapters_alone(model: Any, rank: int) -> Any:
    """Returns a model whose adapters beside the projections of attention are trained, by PEFT's LoRA."""
    from peft import LoraConfig, get_peft_model

    base = getattr(model, "base", model)
    model.requires_grad_(False)
    # As the Trainer does for a model that recomputes.
    base.enable_input_require_grads()
    settings = LoraConfig(r=rank, lora_alpha=rank, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    adapted = get_peft_model(base, settings, autocast_adapter_dtype=False)
    if base is model:
        return adapted
    model.base = adapted
    return model


def model_of(program: Any, divided: Divided) -> torch.nn.Module:
    """Returns the model of a program, or this rank's part of it."""
    if program.family != "decoder":
        model = hugging_face_model(program)
        if program.quantized:
            base = getattr(model, "base", model)
            _quantize(getattr(base, "model", base).layers)
        if program.lora:
            _add_adapters(model.base_model, program.lora)
        return model
    from decoder import Decoder

    return Decoder(program, divided)


def main() -> None:
    """Trains for a few steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--local_rank", type=int, default=0)
    arguments = parser.parse_args()
    program = SimpleNamespace(**json.loads(Path(arguments.program).read_text()))
    if program.precision == "pure bf16":
        torch.set_default_dtype(torch.bfloat16)
    # The parameters of stage 3 are partitioned while the model is made, as users of large models do.
    stage = program.ds_config["zero_optimization"]["stage"]
    deepspeed.init_distributed()
    divided = Divided(program)
    mpu = divided.mpu
    replicas = mpu.get_data_parallel_group() if mpu else None
    with deepspeed.zero.Init(
        config_dict_or_path=program.ds_config, data_parallel_group=replicas, mpu=mpu, enabled=stage == 3
    ):
        model = model_of(program, divided)
    if program.adapters:
        model = with_adapters_alone(model, program.adapters)
    torch.set_default_dtype(torch.float32)
    model.train()
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[each for each in model.parameters() if each.requires_grad],
        config=program.ds_config,
        mpu=mpu,
    )
    # Without DeepSpeed, gradients of one device are not copied into a flat block.
    engine.enable_backward_allreduce = not program.is_plain
    for _ in range(STEPS * program.accumulation):
        tokens = torch.randint(0, program.vocab // program.shards, (program.micro_batch, program.tokens)).to(
            engine.device
        )
        named = program.family != "decoder" and program.loss == "full"
        output = engine(input_ids=tokens, labels=tokens) if named else engine(tokens)
        engine.backward(output.loss if named else output)
        engine.step()


if __name__ == "__main__":
    main()
