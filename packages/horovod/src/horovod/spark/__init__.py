raise ImportError(
    "horovod.spark is not supported by megaclass: `horovod.run(fn, num_proc=…, hosts=…)` runs a function on the hosts."
)
