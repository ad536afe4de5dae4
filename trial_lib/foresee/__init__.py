"""Foresees memory and speed on devices that are not there: `inside` a rank, `memory`, `time`, and the `plan`."""
