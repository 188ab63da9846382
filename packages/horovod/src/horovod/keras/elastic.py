"""Elastic training with model.fit(): the names of horovod.tensorflow.keras.elastic."""

from horovod.tensorflow.keras.elastic import *
from horovod.tensorflow.keras.elastic import __all__ as __all__
