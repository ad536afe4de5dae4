"""What a candidate needs of a device. Pure."""
