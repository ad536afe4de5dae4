class KernelInterface:
    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)


class JITFunction(KernelInterface):
    def __init__(self, fn):
        self.fn = fn
        self.__name__ = fn.__name__

    def run(self, *args, grid, warmup, **kwargs):
        raise RuntimeError("0 active drivers ([]). There should only be one.")
