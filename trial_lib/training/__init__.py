"""The `DeepSpeedTrial` API and its training loop: what runs inside a rank when the user's code is a class.

`deepspeed_trial` is what the user writes, `context` what they are given, `loop` what calls them. `__main__` puts the
three together from a `TrainingSpec`.
"""
