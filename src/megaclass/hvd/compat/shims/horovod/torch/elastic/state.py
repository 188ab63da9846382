from megaclass.hvd.elastic.common import ObjectState
from megaclass.hvd.elastic.sampler import ElasticSampler
from megaclass.hvd.elastic.state import (
    LRSchedulerStateHandler,
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateHandler,
    TorchState,
    get_handler_registry,
    set_handler_registry,
)
from megaclass.hvd.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from megaclass.hvd.lifecycle import rank
