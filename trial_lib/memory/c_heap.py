"""A replay of a run's allocations through a model of the C library's heap, for runs whose device is a processor.

Read from `malloc/malloc.c` of glibc 2.36 (`_int_malloc`, `_int_memalign`, `_int_free`). PyTorch asks for blocks at
multiples of 64 bytes (`c10/core/impl/alloc_cpu.cpp`). For these the library first looks for a hole with room for any
offset, cuts the block out of it, and frees the rest in front and behind. Small objects of the program settle in the
rest behind. So the hole of a block has no room for another block of its size, until a neighbour is free as well. With
many tensors of one size the heap grows far beyond the live bytes.

A block that is larger than any threshold is mapped on its own, and given back when it is freed.
"""

from bisect import bisect_left, insort

_HEADER, _UNIT, _SMALLEST = 8, 16, 32
_ALIGNMENT, _PAGE = 64, 4096
MAPPED_FROM = (32 << 20) - (64 << 10)
"""Bytes. A rank's heap has this threshold from its first step on (`keep_what_is_freed` in `device/rank/cpu.py`)."""


class CHeap:
    """The heap of one process."""

    def __init__(self) -> None:
        # Free pieces by size and start, with both ends to join neighbours.
        self._free: list[tuple[int, int]] = []
        self._sizes: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        self._top = self._mapped = 0
        # Of each handle: start and size. Mapped blocks have no start.
        self._used: dict[int, tuple[int | None, int]] = {}

    @property
    def held(self) -> int:
        """Bytes from its begin to the end of its last block, with all holes, and those of mapped blocks."""
        return self._top + self._mapped

    def allocate(self, handle: int, request: int) -> None:
        """Allocates a block.

        Args:
            handle: names it until it is freed.
            request: bytes.
        """
        size = max(_SMALLEST, -(-(request + _HEADER) // _UNIT) * _UNIT)
        if size >= MAPPED_FROM:
            pages = -(-(size + _ALIGNMENT + _SMALLEST) // _PAGE) * _PAGE
            self._used[handle] = None, pages
            self._mapped += pages
        else:
            self._used[handle] = self._cut(size)

    def free(self, handle: int) -> None:
        """Frees a block. An unknown handle is ignored."""
        start, size = self._used.pop(handle, (None, 0))
        if start is None:
            self._mapped -= size
        else:
            self._release(start, size)

    def _cut(self, size: int) -> tuple[int, int]:
        """Returns start and size of a block, with the rest in front of it, which is freed with it."""
        start, found = self._take(size + _ALIGNMENT + _SMALLEST)
        # The header lies in front of the aligned address.
        front = -(start + _UNIT) % _ALIGNMENT
        if 0 < front < _SMALLEST:
            front += _ALIGNMENT
        end, block = start + found, start + front + size
        if end - block < _SMALLEST:
            block = end
        else:
            self._release(block, end - block)
        return start, block - start

    def _take(self, size: int) -> tuple[int, int]:
        """Returns start and size of the best fit, or of a new piece at the top."""
        place = bisect_left(self._free, (size, 0))
        if place == len(self._free):
            self._top += size
            return self._top - size, size
        found, start = self._free[place]
        self._remove(start)
        if found - size < _SMALLEST:
            return start, found
        self._add(start + size, found - size)
        return start, size

    def _release(self, start: int, size: int) -> None:
        end = start + size
        if end in self._sizes:
            end += self._remove(end)
        if start in self._starts:
            start = self._starts[start]
            self._remove(start)
        if end == self._top:
            self._top = start
        else:
            self._add(start, end - start)

    def _add(self, start: int, size: int) -> None:
        insort(self._free, (size, start))
        self._sizes[start] = size
        self._starts[start + size] = start

    def _remove(self, start: int) -> int:
        size = self._sizes.pop(start)
        del self._starts[start + size]
        del self._free[bisect_left(self._free, (size, start))]
        return size
