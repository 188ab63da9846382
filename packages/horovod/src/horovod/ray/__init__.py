raise ImportError(
    "horovod.ray is not supported by megaclass: `megaclass run --launcher ray` starts a command on a Ray cluster."
)
