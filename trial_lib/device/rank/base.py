"""What every kind of device answers to the rank that trains on it."""

from typing import Any, Protocol


class Device(Protocol):
    """The device of a rank.

    Attributes:
        kind: as PyTorch calls it: `cpu`, `cuda`.
        is_apart: whether it works beside the processor that runs the program: a call returns before its work is done,
            and a thread that waits for it may spin.
    """

    kind: str
    is_apart: bool

    def used_bytes(self) -> int:
        """Returns the bytes in use now."""

    def peak_bytes(self) -> int:
        """Returns the most bytes that were in use at any moment since `start_over`, or `forget_peak`."""

    def available_bytes(self) -> int | None:
        """Returns the bytes that this process may still take; None where nothing bounds it."""

    def left_bytes(self) -> dict[str, int]:
        """Returns the bytes that nobody has (`free`) of all that there are (`total`); empty where nothing bounds them.

        Where an allocator holds memory back, also what it has `reserved`, and what of that is `allocated`.
        """

    def total_bytes(self) -> int:
        """Returns the bytes that the model may have at most; 0 where only `limit` says."""

    def allocator_figures(self) -> dict[str, int]:
        """Returns what the allocator knows beyond the peak: bytes reserved, and retries. Empty where it keeps none."""

    def forget_peak(self) -> None:
        """Has the peak of the steps count from here on, where that of their preparation would hide it."""

    def start_over(self) -> None:
        """Gives free memory back, and has all figures count from here on."""

    def limit(self, budget: int) -> int:
        """Makes every allocation beyond a budget fail, as one on a full device does.

        To be called after the imports.

        Args:
            budget: bytes that this rank may use.

        Returns:
            The bytes of it that are still free for the model.
        """

    def unlimit(self) -> None:
        """Lifts what `limit` has set."""

    def keep_what_is_freed(self) -> None:
        """Has memory that a step frees stay with the process, as it does some tens of steps into a training."""

    def finish(self) -> None:
        """Waits until the device has done what it was given."""

    def instant(self) -> Any:
        """Returns a moment in the device's own course, without waiting for it."""

    def seconds_between(self, start: Any, end: Any) -> float:
        """Returns the seconds from one `instant` to another; after `finish`."""

    def is_recording(self) -> bool:
        """Returns whether work is taken down to be played later: nothing is done now, and nothing can be timed."""

    def is_busy(self) -> bool:
        """Returns whether work is left that was given to it."""

    def multiplies_in_tf32(self, module: Any) -> bool:
        """Returns whether matrices of 32 bits are multiplied with the mantissa of float16, as the program lets it.

        Args:
            module: the model: what convolutions and recurrent layers do has a switch of its own.
        """

    def peak_flops(self, dtype: str) -> float | None:
        """Returns the most FLOP/s of its products of matrices; None where nobody knows.

        Args:
            dtype: of the numbers that are multiplied, as `trial_lib.device.data_sheets.peak_flops` has it.
        """
