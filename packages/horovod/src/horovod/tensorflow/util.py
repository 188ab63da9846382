from horovod.common.util import _cache as _cache
from horovod.tensorflow import refs_to_vars, vars_to_refs


def _executing_eagerly() -> bool:
    import tensorflow

    return bool(tensorflow.executing_eagerly())
