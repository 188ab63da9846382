"""usage: as_host.py PROGRAM ARGUMENTS…: becomes `python PROGRAM ARGUMENTS…`; PROGRAM may be `-m MODULE`.

Prints its process number. With MEGACLASS_TEST_ONE_GPU=1 the process is a host of its own (`be_host`), so ranks that
`megaclass run` starts can share a GPU.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.be_host import be_host

print(f"as_host: pid {os.getpid()}", flush=True)
if os.environ.get("MEGACLASS_TEST_ONE_GPU") == "1":
    be_host(os.getpid())
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
