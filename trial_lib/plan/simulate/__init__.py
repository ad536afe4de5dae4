"""Inside a rank: the user's program under fake tensors, as rank 0 of a pretended world.

`rank` is the entry, and `engine` installs the tables of `patches` before the program runs. `pretended_device` and
`accelerator` are the device and the world that torch and DeepSpeed find; `cuda`, `torch_kernels` and `libraries` are
what a program calls there. `fake_tensors` sees every operator and decides what is fake; `output_memo` makes that fast.
`known_numbers` has the real numbers behind fake tensors. `logs` and `engine_moments` write down what happens and when.
`asks` answers code that wants an unknown number, and `checkpoint_headers` reads files without their weights.
"""
