from megaclass.hvd.elastic.sampler import ElasticSampler
from megaclass.hvd.lifecycle import rank, size
