"""`python -m megaclass` is the command `megaclass`."""

from megaclass.cli.main import command

if __name__ == "__main__":
    command()
