"""`python -m megaclass_launch run|check|bench`, as agents and `check` call it on other hosts."""

from megaclass_launch.command import command

if __name__ == "__main__":
    command()
