from megaclass.hvd.running import run

__all__ = ["run"]
