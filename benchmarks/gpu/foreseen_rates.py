"""Compares the rates that `rates` has measured on a GPU with the seconds that a plan counts for the same operations.

    python -m benchmarks.gpu.foreseen_rates

It needs no GPU. Operations are counted as in a foreseen run, on torch's meta tensors, and take the time of the default
constants. No default is fitted to these rates.
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.foreseen_steps import DEVICE, RESULTS, rounded
from zerotune.trial_lib.messages.foreseen_run import Operation
from zerotune.trial_lib.plan.devices import Cluster, Efficiencies, copy_seconds, kernel_seconds, known_devices
from zerotune.trial_lib.plan.simulate.logs import cost_of

OUTPUT = RESULTS / "gpu_h200_rates_foreseen.json"
_CLUSTER, _CONSTANTS = Cluster(device=known_devices()[DEVICE]), Efficiencies()
# Shorter work is mostly the beginning and the end of a kernel.
_SHORT_S = 50e-6


class Counted(TorchDispatchMode):
    """Adds up the seconds of the operators that are called within it.

    Attributes:
        seconds: foreseen so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds = 0.0
        self._dtypes: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator on meta tensors."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        storages = {each.untyped_storage()._cdata for each in inputs}
        outs = [each for each in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(each, torch.Tensor)]
        made = [each for each in outs if each.untyped_storage()._cdata not in storages]
        if (cost := cost_of(func, args, kwargs, inputs, made, out, self._dtypes)) is not None:
            operation = Operation(*cost[:4])
            self.seconds += kernel_seconds(operation, self._dtypes[operation.dtype], _CLUSTER.device, _CONSTANTS)
        return out


def counted(work: Callable[[], object]) -> float:
    """Returns the foreseen seconds of some work."""
    mode = Counted()
    with mode:
        work()
    return mode.seconds


def meta(*shape: int, dtype: str = "bfloat16") -> Any:
    """Returns a tensor without numbers."""
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def foreseen(name: str) -> float | None:
    """Returns the foreseen seconds of a rate by its name in `stages/rates.py`; None if a plan has nothing for it."""
    kind, *words = name.split(", ") if name.startswith("to the") else name.split()
    if kind == "launch":
        return _CONSTANTS.launch.value
    if name.startswith("to the"):
        return copy_seconds(int(words[1]), words[0] == "pinned", _CLUSTER, _CONSTANTS)
    if kind == "matmul":
        rows, columns, depth = map(int, words[0].split("x"))
        left, right = meta(rows, depth, dtype=words[1]), meta(depth, columns, dtype=words[1])
        return counted(lambda: left @ right)
    if kind == "attention":
        return _attention(*map(int, words[0].split("x")), backward=words[1] == "backward")
    if name.startswith("cross entropy"):
        return _loss(*map(int, words[1].split("x")), backward=words[2] == "backward")
    one, other = meta(int(words[-1])), meta(int(words[-1]))
    passes: dict[str, Callable[[], object]] = {
        "copy": lambda: one.copy_(other),
        "add": lambda: torch.add(one, other, out=meta(int(words[-1]))),
        "to": one.float,
    }
    return counted(passes[kind]) if kind in passes else None


def _attention(samples: int, heads: int, length: int, width: int, *, backward: bool) -> float:
    q, k, v = (meta(samples, heads, length, width).requires_grad_() for _ in range(3))

    def forward() -> Any:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]

    return counted(forward) if not backward else _backward(forward(), (q, k, v))


def _loss(tokens: int, vocabulary: int, *, backward: bool) -> float:
    logits, targets = meta(tokens, vocabulary, dtype="float32").requires_grad_(), meta(tokens, dtype="int64")
    if not backward:
        return counted(lambda: cross_entropy(logits, targets))
    return _backward(cross_entropy(logits, targets), (logits,))


def _backward(result: Any, of: tuple[Any, ...]) -> float:
    gradient = torch.empty_like(result)
    return counted(lambda: torch.autograd.grad(result, of, gradient))


def group_of(name: str, seconds: float) -> str:
    """Returns the kind of a rate, with short work apart."""
    if name.startswith(("matmul", "attention", "cross entropy")):
        kind = {"matmul": "products", "attention": "attention", "cross": "losses"}[name.split()[0]]
        short = ", short" if kind == "products" and seconds < _SHORT_S else ""
        return f"{kind}, {name.split()[-1]}{short}"
    if name == "launch":
        return "a launch"
    return "copies between host and device" if name.startswith("to the") else "passes over the memory"


def rows() -> Iterator[dict[str, Any]]:
    """Yields each measured rate beside its foreseen seconds."""
    rates = json.loads((RESULTS / "gpu_h200_rates.json").read_text())["figures"]["rates"]
    for name, figures in rates.items():
        seconds = foreseen(name)
        if seconds is not None:
            yield {
                "rate": name,
                "group": group_of(name, figures["s"]),
                "us": {"measured": 1e6 * figures["s"], "foreseen": 1e6 * seconds},
                "foreseen over measured": seconds / figures["s"],
            }


def main() -> None:
    """Compares, prints the groups, and writes the result."""
    found = list(rows())
    groups: dict[str, list[float]] = defaultdict(list)
    for row in found:
        groups[row["group"]].append(row["foreseen over measured"])
    summed_up = {
        name: {"rates": len(ratios), "median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
        for name, ratios in groups.items()
    }
    for name, figures in summed_up.items():
        print(name, json.dumps(rounded(figures)))
    OUTPUT.write_text(json.dumps(rounded({"foreseen over measured": summed_up, "rows": found}), indent=1) + "\n")


if __name__ == "__main__":
    main()
