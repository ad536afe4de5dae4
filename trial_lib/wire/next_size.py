"""The step of a rank from one micro-batch size of a sweep to the next.

A rank imports this module, so it needs only the standard library.
"""

from collections.abc import Callable
from typing import Any


class NextSize(SystemExit):
    """Ends the measurement of one size. The probe raises it out of an optimizer step, and another size follows.

    Code that can keep its engine catches it. The code sets the engine to the new batch, calls `go_on` and trains. Any
    other code lets it pass, as it lets `sys.exit()` pass. Such a program is run again from its beginning.

    Args:
        arguments: the program's command line for the next size.
        micro_batch_size: samples of a rank's forward pass.
        gradient_accumulation_steps: micro-batches of an optimizer step.
        go_on: prepares the measurement of the next size. Every rank has to call it after it has dropped the data and
            the loop of the last size. It may end the rank.
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
        """Sets a `DeepSpeedEngine` that has just ended an optimizer step to the batch of the next size.

        DeepSpeed's own setters leave two things out. One is the count that decides which micro-batch ends a step. The
        other is ZeRO's state of the accumulation, which is in buffers in host memory (`runtime/zero/stage_1_and_2.py`).
        """
        steps = self.gradient_accumulation_steps
        engine.set_train_micro_batch_size(self.micro_batch_size)
        engine.set_train_batch_size(self.micro_batch_size * steps * engine.dp_world_size)
        engine.micro_steps -= engine.micro_steps % steps
        if hasattr(engine.optimizer, "gradient_accumulation_steps"):
            engine.optimizer.gradient_accumulation_steps = steps
        getattr(engine.optimizer, "accumulated_grads_in_cpu", {}).clear()
