from megaclass.hvd.horovod_threads import execute_function_multithreaded, in_thread, on_event

__all__ = ["execute_function_multithreaded", "in_thread", "on_event"]
