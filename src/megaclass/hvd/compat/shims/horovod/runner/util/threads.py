from megaclass.hvd.compat.threads import execute_function_multithreaded, in_thread, on_event
