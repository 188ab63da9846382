from megaclass.hvd.run_function import run as run


class _HorovodArgs:
    """What horovodrun was asked for; names that are not set are None."""

    num_proc = 1

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
