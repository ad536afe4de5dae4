"""The `DeepSpeedTrial` API and its training loop, inside a rank whose program is a class.

The user writes a `deepspeed_trial`, gets a `context`, and `loop` calls the trial. `__main__` puts the three together
from a `TrainingSpec`.
"""
