"""The tables of what a foreseen run replaces in the user's program, in the order in which they are installed.

`python -m zerotune.trial_lib.plan.simulate.patches` prints them.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from zerotune.trial_lib.plan.simulate import (
    accelerator,
    asks,
    checkpoint_headers,
    cuda,
    engine_moments,
    fake_tensors,
    libraries,
    pretended_device,
    torch_kernels,
)
from zerotune.trial_lib.rank.patching import Patch, Table

# The device and the world, before DeepSpeed and the program look for them.
WORLD: Table = (*pretended_device.PATCHES, *accelerator.PATCHES)
# Of the calls that divide a run into parts.
MOMENTS: Table = engine_moments.PATCHES
# What a program and its libraries call.
PROGRAM: Table = (
    *fake_tensors.PATCHES,
    *cuda.PATCHES,
    *asks.PATCHES,
    *torch_kernels.PATCHES,
    *libraries.PATCHES,
    *checkpoint_headers.PATCHES,
)


def _noting_length(fit: Callable[..., Any], facts: Any) -> Callable[..., Any]:
    @functools.wraps(fit)
    def begun(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        # Arguments of the Hugging Face Trainer, or Lightning's Trainer itself. Not positive means no limit.
        given = getattr(trainer, "args", trainer)
        steps = getattr(given, "max_steps", None) or 0
        epochs = getattr(given, "num_train_epochs", None) or getattr(given, "max_epochs", None) or 0
        facts.note(whole_steps=steps if steps > 0 else None, whole_epochs=float(epochs) if epochs > 0 else None)
        return fit(trainer, *args, **kwargs)

    return begun


_LENGTH_WHY = "The Trainer's steps or epochs are those of the whole training."
# Outside of what a rank replaces there, because that trains for longer. Given are the findings about the program.
LENGTH: Table = (
    Patch("transformers.trainer", "Trainer.train", _LENGTH_WHY, _noting_length),
    Patch("lightning.pytorch.trainer.trainer", "Trainer.fit", _LENGTH_WHY, _noting_length),
    Patch("pytorch_lightning.trainer.trainer", "Trainer.fit", _LENGTH_WHY, _noting_length),
)


def listed() -> Iterator[str]:
    """A line for each library, name and reason. A function that several modules of CUDA's have is listed once."""
    for row in (*WORLD, *MOMENTS, *PROGRAM, *LENGTH):
        names = row.what.split() if isinstance(row, Patch) else [row.what]
        if len(names) > 1 and names[0].startswith("cuda."):
            names = [name for name in names if name.startswith("cuda.") and name.count(".") == 1] or names
        yield f"{row.library}: {', '.join(names)}. {row.why}"


if __name__ == "__main__":
    print(*listed(), sep="\n")
