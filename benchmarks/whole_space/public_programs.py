"""Public programs as their authors wrote them: two examples of transformers, of one release, checked by their hash."""

import hashlib
import subprocess
from dataclasses import dataclass
from pathlib import Path

URL, TAG = "https://github.com/huggingface/transformers", "v5.1.0"
_FOLDER = "examples/pytorch"


@dataclass(frozen=True)
class PublicProgram:
    """A program, and the command that its user types.

    Attributes:
        path: of the program, below the folder of the examples.
        sha256: of its file at the tag.
        words: behind the program, as typed.
        vary: the switches to vary.
    """

    path: str
    sha256: str
    words: tuple[str, ...]
    vary: tuple[str, ...]

    def of(self, checkout: Path) -> Path:
        """Returns the file in a checkout of transformers.

        Raises:
            ValueError: it is not the file of the tag.
        """
        path = checkout / _FOLDER / self.path
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != self.sha256:
            raise ValueError(f"{path} is not the program of transformers {TAG}. Check that tag out: git checkout {TAG}")
        return path


_TRAINER = (
    *("--deepspeed", "ds_config.json", "--do_train", "--use_cpu", "--output_dir", "out"),
    *("--report_to", "none", "--save_strategy", "no"),
)

PROGRAMS = {
    "llama": PublicProgram(
        path="language-modeling/run_clm.py",
        sha256="59cc84e51816afc5f24a19165ed07d31c6a8ed65dd70abafc0858eddf74eb830",
        words=(
            *_TRAINER,
            *("--config_name", "model", "--tokenizer_name", "tokenizer", "--train_file", "text.txt"),
            *("--block_size", "96", "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "4"),
            *("--gradient_checkpointing", "True", "--optim", "adamw_torch"),
        ),
        vary=("--gradient_checkpointing=true,false", "--optim=adamw_torch,adamw_torch_fused"),
    ),
    "convnext": PublicProgram(
        path="image-classification/run_image_classification.py",
        sha256="3865ba742d2fffd152c49059a598d7fb6531aa17d6df56e85c7f45d72586ed01",
        words=(
            *_TRAINER,
            *("--model_name_or_path", "model", "--train_dir", "pictures", "--remove_unused_columns", "False"),
            *("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "4", "--optim", "adamw_torch"),
        ),
        vary=("model:activation_checkpointing", "loader:num_workers", "optimizer:fused"),
    ),
}


def checkout_of(path: Path | None, work: Path) -> Path:
    """Returns a checkout of transformers at the tag; clones it if no path is given."""
    if path is not None:
        return path.resolve()
    clone = work / f"transformers-{TAG}"
    if not clone.exists():
        print(f"git clone of {URL} at {TAG}", flush=True)
        subprocess.run(["git", "clone", "-q", "--depth", "1", "--branch", TAG, URL, str(clone)], check=True)
    return clone
