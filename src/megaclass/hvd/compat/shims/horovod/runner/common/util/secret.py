import os


def make_secret_key() -> bytes:
    return os.urandom(32)
