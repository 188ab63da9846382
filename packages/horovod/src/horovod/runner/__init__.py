from horovod.runner.run_function import run as run


class _HorovodArgs:
    """The arguments of horovodrun; names that are not set are None."""

    num_proc = 1

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
