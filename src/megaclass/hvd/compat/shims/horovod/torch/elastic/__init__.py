from megaclass.hvd.elastic import ElasticSampler, TorchState, init, reset, run, run_fn, shutdown

from . import sampler as sampler
from . import state as state
