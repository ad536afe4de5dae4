"""Plans for devices that are not there: foreseen runs, their memory and time, and the answer."""
