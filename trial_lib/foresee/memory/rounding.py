"""The sizes that PyTorch's allocators give to requests.

Sources: `c10/cuda/CUDACachingAllocator.cpp` (`round_size`) and `aten/src/ATen/core/CachingHostAllocator.h` of PyTorch
2.13. The second rounds a request for pinned memory up to a power of two.
"""

SMALLEST_BLOCK = 512
"""Bytes. Every block on a device is a multiple of it (`kMinBlockSize`)."""


def rounded(size: float, place: str) -> float:
    """Returns the bytes that a request takes.

    Args:
        size: the request, in bytes.
        place: one of `PLACES`. Plain host memory is not rounded.
    """
    if size <= 0:
        return 0
    if place == "pinned":
        return 1 << (int(size) - 1).bit_length()
    if place == "device":
        return -(-int(size) // SMALLEST_BLOCK) * SMALLEST_BLOCK
    return size
