"""The user's command: its words, its launcher, the places in it that hold a batch, and the command of a trial."""
