import os


def get_env_rank_and_size() -> tuple[int, int]:
    """Reads rank and size from the starter's variables; (0, 1) without a starter."""
    for prefix in ("HOROVOD_", "OMPI_COMM_WORLD_", "PMI_"):
        rank, size = os.environ.get(f"{prefix}RANK"), os.environ.get(f"{prefix}SIZE")
        if rank is not None and size is not None:
            return int(rank), int(size)
        if rank is not None or size is not None:
            raise RuntimeError(
                f"Could not determine process rank and size: only one of {prefix}RANK and {prefix}SIZE found in environment"
            )
    return 0, 1
