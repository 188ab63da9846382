"""Elastic training with Horovod's names: `hvd.elastic.run`, `TorchState`, `ElasticSampler` and so on.

    state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0)

    @hvd.elastic.run
    def train(state):
        ...
        state.commit()

    train(state)

horovod/common/elastic.py has what does not depend on torch; docs/elastic.md explains what happens when ranks come and go.
"""

from horovod.common.basics import init, shutdown
from horovod.common.elastic import HostUpdateResult, ObjectState, State, reset, run, run_fn
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.torch.elastic import sampler, state
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import TorchState
