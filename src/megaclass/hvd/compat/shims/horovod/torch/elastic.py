raise ImportError("horovod.torch.elastic is not there yet: elastic jobs are not supported by megaclass.")
