"""Inside a rank: the user's program under fake tensors, as rank 0 of a pretended world.

`rank` is the entry, and `foreseeing` replaces what has to be replaced before the program runs. `pretended_device` and
`accelerator` are the device that torch and DeepSpeed find. `fake_tensors` sees every operator and decides what is fake;
`output_memo` makes that fast. `known_numbers` has the real numbers behind fake tensors. `logs` and `engine_moments`
write down what happens and when. `asks` answers code that wants an unknown number.
"""
