"""The interface that every kind of device implements for the rank that trains on it."""

from typing import Any, Protocol


class Device(Protocol):
    """The device of a rank.

    Attributes:
        kind: PyTorch's name: `cpu`, `cuda`.
        is_apart: whether it works beside the processor that runs the program. Then a call returns before its work is
            done, and a thread that waits for it may spin.
    """

    kind: str
    is_apart: bool

    def used_bytes(self) -> int:
        """Returns the bytes in use now."""

    def peak_bytes(self) -> int:
        """Returns the most bytes in use at any moment since `start_over` or `forget_peak`."""

    def available_bytes(self) -> int | None:
        """Returns the bytes that this process may still take; None if nothing limits it."""

    def left_bytes(self) -> dict[str, int]:
        """Returns the free bytes (`free`) of all bytes (`total`); empty if nothing limits them.

        If an allocator holds memory back, it also has the bytes `reserved` and, of these, `allocated`.
        """

    def total_bytes(self) -> int:
        """Returns the most bytes that the model may have; 0 if only `limit` decides."""

    def allocator_figures(self) -> dict[str, int]:
        """Returns the allocator's figures beside the peak: bytes reserved, and retries. Empty if it has none."""

    def forget_peak(self) -> None:
        """Starts the peak of the steps here, if the peak of their preparation would hide it."""

    def start_over(self) -> None:
        """Returns free memory, and starts all figures here."""

    def limit(self, budget: int) -> int:
        """Makes every allocation beyond a budget fail, as on a full device. Call it after the imports.

        Args:
            budget: bytes that this rank may use.

        Returns:
            The bytes of the budget that are still free for the model.
        """

    def unlimit(self) -> None:
        """Removes the limit."""

    def keep_what_is_freed(self) -> None:
        """Keeps memory that a step frees with the process, as some tens of steps into a training."""

    def finish(self) -> None:
        """Waits until the device has done its work."""

    def instant(self) -> Any:
        """Returns a moment in the device's own time, without waiting for it."""

    def seconds_between(self, start: Any, end: Any) -> float:
        """Returns the seconds from one `instant` to another. Call `finish` first."""

    def is_recording(self) -> bool:
        """Returns whether work is recorded for later. Then nothing is done now, and nothing can be timed."""

    def is_busy(self) -> bool:
        """Returns whether the device has unfinished work."""

    def multiplies_in_tf32(self, module: Any) -> bool:
        """Returns whether 32-bit matrices are multiplied with the mantissa of float16, as the program allows.

        Args:
            module: the model. Convolutions and recurrent layers have a switch of their own.
        """

    def peak_flops(self, dtype: str) -> float | None:
        """Returns the most FLOP/s of its products of matrices; None if unknown.

        Args:
            dtype: the type of the numbers, as for `trial_lib.device.data_sheets.peak_flops`.
        """
