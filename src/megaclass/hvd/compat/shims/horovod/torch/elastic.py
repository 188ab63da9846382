raise ImportError("horovod.torch.elastic is not available: elastic jobs are not supported by megaclass.")
