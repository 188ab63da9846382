"""usage: as_host.py PROGRAM ARGUMENTS…: runs the program, `-m MODULE` or a file, as `python PROGRAM ARGUMENTS…` does.

Prints its process number. With MEGACLASS_TEST_ONE_GPU=1 the process is a host of its own (`be_host`), so that ranks that
`megaclass run` starts can share a GPU.
"""

import os
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.be_host import be_host

print(f"as_host: pid {os.getpid()}", flush=True)
if os.environ.get("MEGACLASS_TEST_ONE_GPU") == "1":
    be_host(os.getpid())
sys.argv = sys.argv[1:]
if sys.argv[0] == "-m":
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
