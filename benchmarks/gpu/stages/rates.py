"""Rates: what the device does of products, attention, passes over its memory, and copies, one kind at a time."""

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.kit import Kit

WARM_UPS, REPEATS = 3, 10
# Rows, columns and inner side of a product: squares, then those of the kit's models at 1,024 to 16,384 tokens.
SQUARES = (1024, 2048, 4096, 8192)
TOKENS = (1024, 4096, 16384)
WIDTHS = ((768, 2048), (2048, 5632))
VOCABULARY = 32_000
# Samples, heads, length and width of a head.
ATTENTIONS = ((4, 12, 1024, 64), (16, 12, 1024, 64), (4, 16, 1024, 128), (2, 16, 4096, 128))
ELEMENTS = (2**20, 2**24, 2**28)
LAUNCHES = 1000


def run(kit: Kit) -> None:
    import torch

    rates = Rates(kit, torch)
    shrink = 64 if kit.is_toy else 1
    for side in SQUARES:
        rates.product(side // shrink, side // shrink, side // shrink, "bfloat16")
    for tokens in TOKENS:
        for hidden, inner in WIDTHS:
            for columns, depth in ((3 * hidden, hidden), (inner, hidden), (hidden, inner), (VOCABULARY, hidden)):
                rates.product(tokens // shrink, columns // shrink, depth // shrink, "bfloat16")
    for number_format in ("float32", "float16"):
        rates.product(4096 // shrink, 4096 // shrink, 4096 // shrink, number_format)
    for elements in ELEMENTS:
        rates.passes(elements // shrink**2)
    for attention in ATTENTIONS:
        rates.attention(*attention[:2], attention[2] // shrink, attention[3])
    for tokens in TOKENS[1:]:
        rates.losses(tokens // shrink, VOCABULARY // shrink)
    rates.launches()
    rates.copies(2**28 // shrink**2)
    kit.report.check(
        "the device multiplies, and passes over its memory", bool(rates.found), f"{len(rates.found)} rates"
    )


class Rates:
    """Measures operations one after another, each by the median of some.

    Args:
        kit: the stage's.
        torch: the module, which the driver's processes import nowhere else.

    Attributes:
        found: the seconds of each operation, with its TFLOP/s or GB/s.
    """

    def __init__(self, kit: Kit, torch: Any) -> None:
        self._kit, self._torch = kit, torch
        self._device = "cuda" if kit.is_cuda else "cpu"
        self.found: dict[str, dict[str, float]] = {}

    def product(self, rows: int, columns: int, depth: int, number_format: str) -> None:
        """Multiplies two matrices of random numbers."""
        left, right = self._random(rows, depth, dtype=number_format), self._random(depth, columns, dtype=number_format)
        name = f"matmul {rows}x{columns}x{depth} {number_format}"
        self._note(name, self._seconds(lambda: left @ right), flops=2 * rows * columns * depth)

    def passes(self, elements: int) -> None:
        """Copies and adds bfloat16 numbers, and widens them."""
        one, other = self._random(elements), self._random(elements)
        result = self._torch.empty_like(one)
        self._note(f"copy {elements}", self._seconds(lambda: result.copy_(one)), moved=4 * elements)
        add = self._torch.add
        self._note(f"add {elements}", self._seconds(lambda: add(one, other, out=result)), moved=6 * elements)
        self._note(f"to float32 {elements}", self._seconds(one.float), moved=6 * elements)

    def attention(self, samples: int, heads: int, length: int, width: int) -> None:
        """Runs causal attention, forward and backward. Its FLOPs are counted as if it computed all scores."""
        torch, attend = self._torch, self._torch.nn.functional.scaled_dot_product_attention
        q, k, v = (self._random(samples, heads, length, width).requires_grad_() for _ in range(3))
        flops, name = 4 * samples * heads * length**2 * width, f"{samples}x{heads}x{length}x{width}"
        self._note(f"attention {name} forward", self._seconds(lambda: attend(q, k, v, is_causal=True)), flops=flops)
        result = attend(q, k, v, is_causal=True)
        gradient = torch.randn_like(result)
        backward = self._seconds(lambda: torch.autograd.grad(result, (q, k, v), gradient, retain_graph=True))
        self._note(f"attention {name} backward", backward, flops=2.5 * flops)

    def losses(self, tokens: int, vocabulary: int) -> None:
        """Runs the cross entropy of float32 logits, forward and backward."""
        torch = self._torch
        logits = self._random(tokens, vocabulary, dtype="float32").requires_grad_()
        targets = torch.randint(0, vocabulary, (tokens,), device=self._device)
        entropy, size = torch.nn.functional.cross_entropy, 4 * tokens * vocabulary
        name = f"cross entropy {tokens}x{vocabulary}"
        self._note(f"{name} forward", self._seconds(lambda: entropy(logits, targets)), moved=3 * size)
        loss = entropy(logits, targets)
        backward = self._seconds(lambda: torch.autograd.grad(loss, logits, retain_graph=True))
        self._note(f"{name} backward", backward, moved=2 * size)

    def launches(self) -> None:
        """Starts many kernels that do nearly nothing."""
        number = self._torch.zeros(1, device=self._device)
        for _ in range(2):
            began = time.perf_counter()
            for _ in range(LAUNCHES):
                number.add_(1)
            self._wait()
            seconds = (time.perf_counter() - began) / LAUNCHES
        self._note("launch", seconds)

    def copies(self, size: int) -> None:
        """Copies bytes between the host and the device."""
        if not self._kit.is_cuda:
            self._kit.report.leave_out("copies between host and device", "there is no device")
            return
        torch = self._torch
        there = torch.empty(size, dtype=torch.uint8, device=self._device)
        for kind, pin in (("pinned", True), ("plain", False)):
            here = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
            to_device = self._seconds(lambda here=here: there.copy_(here, non_blocking=True))
            self._note(f"to the device, {kind}, {size}", to_device, moved=size)
            to_host = self._seconds(lambda here=here: here.copy_(there, non_blocking=True))
            self._note(f"to the host, {kind}, {size}", to_host, moved=size)

    def _random(self, *sizes: int, dtype: str = "bfloat16") -> Any:
        return self._torch.randn(*sizes, device=self._device).to(getattr(self._torch, dtype))

    def _wait(self) -> None:
        if self._kit.is_cuda:
            self._torch.cuda.synchronize()

    def _seconds(self, work: Callable[[], Any]) -> float:
        """Returns the median of some runs, each between two events of the device."""
        for _ in range(WARM_UPS):
            work()
        if not self._kit.is_cuda:
            times = []
            for _ in range(REPEATS):
                began = time.perf_counter()
                work()
                times.append(time.perf_counter() - began)
            return statistics.median(times)
        events = [[self._torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
        # The device has work all the time: what it waits for the processor is in no figure.
        self._torch.cuda._sleep(10_000_000)
        for start, end in events:
            start.record()
            work()
            end.record()
        self._wait()
        return statistics.median(start.elapsed_time(end) / 1e3 for start, end in events)

    def _note(self, name: str, seconds: float, flops: float = 0.0, moved: float = 0.0) -> None:
        rates = {"TFLOP/s": flops / seconds / 1e12} if flops else {"GB/s": moved / seconds / 1e9} if moved else {}
        self.found[name] = {"s": seconds, **rates}
        self._kit.report.figure("rates", self.found)
