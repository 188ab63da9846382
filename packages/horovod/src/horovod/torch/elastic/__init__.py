"""Elastic training with Horovod's names: `hvd.elastic.run`, `TorchState`, `ElasticSampler` and so on.

    state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0)

    @hvd.elastic.run
    def train(state):
        ...
        state.commit()

    train(state)

common.py has what does not depend on torch; docs/elastic.md explains what happens when ranks come and go.
"""

from horovod.common.elastic import HostUpdateResult as HostUpdateResult
from horovod.common.elastic import ObjectState as ObjectState
from horovod.common.elastic import State as State
from horovod.common.elastic import reset as reset
from horovod.common.elastic import run as run
from horovod.common.elastic import run_fn as run_fn
from horovod.common.exceptions import HorovodInternalError as HorovodInternalError
from horovod.common.exceptions import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from horovod.common.lifecycle import init as init
from horovod.common.lifecycle import shutdown as shutdown
from horovod.torch.elastic import sampler as sampler
from horovod.torch.elastic import state as state
from horovod.torch.elastic.sampler import ElasticSampler as ElasticSampler
from horovod.torch.elastic.state import TorchState as TorchState
