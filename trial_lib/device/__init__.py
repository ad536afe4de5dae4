"""What is asked of a device, with a file for each kind."""
