"""Models and data of the public programs: made here, always the same, and small. Nothing is downloaded."""

import json
import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    ConvNextConfig,
    ConvNextForImageClassification,
    ConvNextImageProcessor,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

# So many pictures of each label that an epoch is longer than a training of 25 steps: workers start anew in each epoch.
_LABELS, _PICTURES, _SIDE = ("heath", "marsh", "sand", "wood"), 300, 64
_VOCABULARY, _LINES = 1024, 6000
_SECTION = {"stage": 2, "reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000}
_CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": _SECTION,
}
# `evaluate.load("accuracy")` of the program takes a folder of this name before it asks the hub.
_METRIC = '''"""The metric that the program loads by its name."""

import datasets
import evaluate
import numpy as np


class Accuracy(evaluate.Metric):
    def _info(self):
        number = datasets.Value("int64")
        features = datasets.Features({"predictions": number, "references": number})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": float((np.asarray(predictions) == np.asarray(references)).mean())}
'''


def make_inputs(name: str, folder: Path) -> None:
    """Writes everything that a program's command names.

    Args:
        name: of the program.
        folder: where its user types the command.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ds_config.json").write_text(json.dumps(_CONFIG, indent=2) + "\n")
    {"llama": _language, "convnext": _pictures}[name](folder)


def _language(folder: Path) -> None:
    text = folder / "text.txt"
    text.write_text(_sentences())
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    trainer = trainers.BpeTrainer(vocab_size=_VOCABULARY, special_tokens=list(special.values()), show_progress=False)
    tokenizer.train([str(text)], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "tokenizer")
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
    )
    config.save_pretrained(folder / "model")


def _sentences() -> str:
    """Returns lines of invented words, each of which has few followers."""
    draws = random.Random(0)
    syllables = [first + last for first in "bdfgklmnprst" for last in "aeiou"]
    words = ["".join(draws.choices(syllables, k=draws.randint(1, 3))) for _ in range(400)]
    followers = {word: draws.choices(words, k=4) for word in words}
    lines = []
    for _ in range(_LINES):
        line = [draws.choice(words)]
        for _ in range(draws.randint(6, 18)):
            line.append(draws.choice(followers[line[-1]]))
        lines.append(" ".join(line) + ".")
    return "\n".join(lines) + "\n"


def _pictures(folder: Path) -> None:
    draws = np.random.default_rng(0)
    for label in _LABELS:
        (folder / "pictures" / label).mkdir(parents=True, exist_ok=True)
        for number in range(_PICTURES):
            coarse = Image.fromarray(draws.integers(0, 256, (30, 40, 3), dtype=np.uint8))
            # The size of a small photograph, so that decoding takes a share of a step.
            picture = coarse.resize((640, 480), Image.Resampling.BICUBIC)
            picture.save(folder / "pictures" / label / f"{number:03}.jpg", quality=90)
    torch.manual_seed(0)
    config = ConvNextConfig(
        hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 4, 2], num_labels=len(_LABELS), image_size=_SIDE
    )
    ConvNextForImageClassification(config).save_pretrained(folder / "model")
    ConvNextImageProcessor(size={"shortest_edge": _SIDE}).save_pretrained(folder / "model")
    (folder / "accuracy").mkdir(exist_ok=True)
    (folder / "accuracy" / "accuracy.py").write_text(_METRIC)
