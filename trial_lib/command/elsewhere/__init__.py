"""Commands that start a training where ZeroTune does not see it."""
