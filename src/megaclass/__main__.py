"""`python -m megaclass` is the command `megaclass`."""

import sys

from megaclass.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
