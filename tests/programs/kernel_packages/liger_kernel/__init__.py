"""Stands for liger-kernel 0.8.5: one of its autograd functions, which allocates as the package's does."""
