"""The tables of what a foreseen run replaces in the user's program, in the order in which they are installed.

`python -m zerotune.trial_lib.plan.simulate.patches` prints them.
"""

from collections.abc import Iterator

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


def listed() -> Iterator[str]:
    """A line for each library, name and reason. A function that several modules of CUDA's have is listed once."""
    for row in (*WORLD, *MOMENTS, *PROGRAM):
        names = row.what.split() if isinstance(row, Patch) else [row.what]
        if len(names) > 1 and names[0].startswith("cuda."):
            names = [name for name in names if name.startswith("cuda.") and name.count(".") == 1] or names
        yield f"{row.library}: {', '.join(names)}. {row.why}"


if __name__ == "__main__":
    print(*listed(), sep="\n")
