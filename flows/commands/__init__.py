"""The commands of the command line: one file does what one command says."""
