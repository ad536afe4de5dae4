"""The environment variables that describe the place of a rank. A rank imports this module before torch."""

ADDRESS, PORT = "MASTER_ADDR", "MASTER_PORT"
"""Where the ranks meet."""

DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""The devices that a rank finds. HIP reads both, and its own first."""

NUMBERING = ("CUDA_DEVICE_ORDER", "ROCR_VISIBLE_DEVICES")
"""What decides how CUDA and HIP number the devices."""

PLACE = (ADDRESS, PORT, *DEVICES, *NUMBERING, "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""All of them."""
