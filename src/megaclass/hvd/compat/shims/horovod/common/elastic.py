raise ImportError("horovod.common.elastic is not there yet: elastic jobs are not supported by megaclass.")
