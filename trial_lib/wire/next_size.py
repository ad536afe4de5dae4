"""How a rank goes from one micro-batch size of a sweep to the next. A rank imports it: standard library only."""

from collections.abc import Callable
from typing import Any


class NextSize(SystemExit):
    """Raised out of the optimizer step with which one size is measured: another is to follow.

    Code that can go on with the engine it has catches it, sets the engine to the batch asked for, calls `go_on` and
    trains. Any other code lets it pass, as it lets `sys.exit()` pass, and is run again from its beginning.

    Args:
        arguments: of the program's command line for the next size.
        micro_batch_size: samples of a rank's forward pass.
        gradient_accumulation_steps: micro-batches of an optimizer step.
        go_on: prepares the measurement of the next size; to be called on every rank, when the data and the loop of the
            last one are gone. It may end the rank.
    """

    def __init__(
        self,
        arguments: list[str],
        micro_batch_size: int,
        gradient_accumulation_steps: int,
        go_on: Callable[[], None],
    ) -> None:
        super().__init__(0)
        self.arguments = arguments
        self.micro_batch_size = micro_batch_size
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.go_on = go_on

    def set_batch(self, engine: Any) -> None:
        """Sets a `DeepSpeedEngine`, which has just ended an optimizer step, to the batch of the next size.

        DeepSpeed's own setters leave out what is set here besides: the count that says which micro-batch ends a step,
        and what ZeRO keeps of the accumulation (`runtime/zero/stage_1_and_2.py`: buffers in host memory).
        """
        steps = self.gradient_accumulation_steps
        engine.set_train_micro_batch_size(self.micro_batch_size)
        engine.set_train_batch_size(self.micro_batch_size * steps * engine.dp_world_size)
        engine.micro_steps -= engine.micro_steps % steps
        if hasattr(engine.optimizer, "gradient_accumulation_steps"):
            engine.optimizer.gradient_accumulation_steps = steps
        getattr(engine.optimizer, "accumulated_grads_in_cpu", {}).clear()
