"""What a process in the user's environment asks of its devices, by PyTorch."""
