"""Horovod's exceptions, and its error texts that scripts and tests compare."""

__all__ = ["HorovodInternalError"]

NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."

SHUT_DOWN = (
    "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce, "
    "allgather or broadcast a tensor after one of the ranks finished execution. If the shutdown was caused by an "
    "exception, you should see the exception in the log before the first shutdown message."
)

DUPLICATE_NAME = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is currently "
    "being processed.  If you want to request another tensor, use a different tensor name."
)


class HorovodInternalError(RuntimeError):
    """A collective operation failed: ranks disagree, a rank is gone, or the job was shut down."""


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 (Horovod's name)
    """The set of hosts of an elastic job has changed."""

    def __init__(self, skip_sync: bool) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    return (
        f"Framework {name} installed with version {installed_version} but found version {version}.\n"
        f"             This can result in unexpected behavior including runtime errors.\n"
        f"             Reinstall Horovod using `pip install --no-cache-dir` to build with the new version."
    )


class HorovodVersionMismatchError(ImportError):
    """Exists for scripts that catch it; nothing here is compiled against a framework, so it is never raised."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version
