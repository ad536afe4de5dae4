"""What programs and their libraries take for granted of a device, in a foreseen run: CUDA, its kernels, weights."""
