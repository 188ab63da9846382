raise ImportError("horovod.common.elastic is not available: elastic jobs are not supported by megaclass.")
