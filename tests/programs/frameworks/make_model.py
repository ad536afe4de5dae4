"""Makes what the frameworks fine-tune: a Llama of 0.9 million parameters with a tokenizer, and texts in their forms."""

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

WORDS = [
    "the",
    "model",
    "trains",
    "on",
    "small",
    "text",
    "about",
    "gradients",
    "memory",
    "speed",
    "and",
    "batches",
    "of",
    "tokens",
    "while",
    "the",
    "machine",
    "waits",
    "for",
    "data",
]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"


def text(least: int, most: int) -> str:
    return " ".join(random.choices(WORDS, k=random.randint(least, most)))


def main() -> None:
    set_seed(0)
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([text(30, 30) for _ in range(300)], trainer)
    names = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token"), special, strict=True))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.chat_template = TEMPLATE
    fast.save_pretrained("tiny")
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    config: Any = LlamaConfig(
        vocab_size=len(fast),
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
        **sizes,
    )
    LlamaForCausalLM(config).save_pretrained("tiny")
    rows = [{"instruction": text(5, 20), "input": "", "output": text(5, 40)} for _ in range(4000)]
    Path("alpaca.json").write_text(json.dumps(rows))
    Path("dataset_info.json").write_text(json.dumps({"tiny": {"file_name": "alpaca.json"}}))
    talks = [
        [{"role": "user", "content": row["instruction"]}, {"role": "assistant", "content": row["output"]}]
        for row in rows
    ]
    lines = "\n".join(json.dumps({"messages": talk}) for talk in talks)
    Path("messages.jsonl").write_text(lines)
    Path("msgs").mkdir()
    Path("msgs", "train.jsonl").write_text(lines)


if __name__ == "__main__":
    main()
