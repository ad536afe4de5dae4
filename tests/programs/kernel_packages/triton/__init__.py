"""What a program needs of triton 3.9 on a host without a GPU: it can be imported, and no kernel can be launched."""

from triton.runtime.jit import JITFunction

__version__ = "3.9.0"


def jit(fn):
    return JITFunction(fn)
