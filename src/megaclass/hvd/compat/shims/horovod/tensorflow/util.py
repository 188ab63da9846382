from megaclass.hvd.compat.util import _cache as _cache
from megaclass.hvd.tensorflow import refs_to_vars, vars_to_refs


def _executing_eagerly() -> bool:
    import tensorflow

    return bool(tensorflow.executing_eagerly())
