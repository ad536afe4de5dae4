"""The search space: the knobs of DeepSpeed, when each has an effect, and the arms made of them."""
