raise ImportError("horovod.tensorflow.elastic is not available: elastic jobs are not supported by megaclass.")
