"""Elastic training with Horovod's names: `hvd.elastic.run`, `TorchState`, `ElasticSampler` and so on.

    state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0)

    @hvd.elastic.run
    def train(state):
        ...
        state.commit()

    train(state)

common.py has what does not depend on torch; docs/elastic.md explains what happens when ranks come and go.
"""

from megaclass.hvd.elastic import sampler as sampler
from megaclass.hvd.elastic import state as state
from megaclass.hvd.elastic.common import HostUpdateResult as HostUpdateResult
from megaclass.hvd.elastic.common import ObjectState as ObjectState
from megaclass.hvd.elastic.common import State as State
from megaclass.hvd.elastic.common import reset as reset
from megaclass.hvd.elastic.common import run as run
from megaclass.hvd.elastic.common import run_fn as run_fn
from megaclass.hvd.elastic.sampler import ElasticSampler as ElasticSampler
from megaclass.hvd.elastic.state import TorchState as TorchState
from megaclass.hvd.exceptions import HorovodInternalError as HorovodInternalError
from megaclass.hvd.exceptions import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from megaclass.hvd.lifecycle import init as init
from megaclass.hvd.lifecycle import shutdown as shutdown
