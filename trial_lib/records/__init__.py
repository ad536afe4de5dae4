"""The records of trials, studies and full experiments, and the names of their files."""
