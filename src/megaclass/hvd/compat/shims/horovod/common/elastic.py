from megaclass.hvd.elastic.common import (
    HostUpdateResult,
    ObjectState,
    State,
    WorkerNotificationManager,
    notification_manager,
    run_fn,
)
from megaclass.hvd.exceptions import HorovodInternalError, HostsUpdatedInterrupt
