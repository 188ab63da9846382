from collections.abc import Iterable, Mapping, Sequence

from megaclass.hvd.compat.launching import run_command

from .common.util.settings import Settings
from .util import network


def gloo_run(
    settings: Settings, nics: Iterable[str] | None, env: Mapping[str, str], server_ip: str, command: Sequence[str]
) -> None:
    """Runs the command on all ranks; raises RuntimeError if a rank fails. `server_ip` is ignored: the launcher chooses it."""
    assert settings.num_proc is not None
    run_command(
        command,
        num_proc=settings.num_proc,
        hosts=settings.hosts,
        ssh_port=settings.ssh_port,
        ssh_identity_file=settings.ssh_identity_file,
        output_filename=settings.output_filename,
        nics=nics,
        with_timestamp=settings.prefix_output_with_timestamp,
        verbose=settings.verbose,
        env=env,
    )
