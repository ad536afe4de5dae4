"""The knobs of the catalogue, a file for each kind. Read from DeepSpeed 0.19.8. Pure: standard library only."""
