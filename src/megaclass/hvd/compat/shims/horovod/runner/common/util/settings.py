from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True)
class BaseSettings:
    """How to start a job; settings about MPI have no effect."""

    num_proc: int | None = None
    verbose: int = 0
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    extra_mpi_args: str | None = None
    tcp_flag: bool | None = None
    binding_args: str | None = None
    key: bytes | None = None
    start_timeout: Any = None
    output_filename: str | None = None
    run_func_mode: bool | None = None
    nics: Iterable[str] | None = None
    elastic: bool = False
    prefix_output_with_timestamp: bool = False


@dataclass(kw_only=True)
class Settings(BaseSettings):
    hosts: str | None = None
    """host:slots,host:slots"""
