"""Elastic training with model.fit(): the names of megaclass.hvd.tensorflow.keras.elastic."""

from megaclass.hvd.tensorflow.keras.elastic import *
from megaclass.hvd.tensorflow.keras.elastic import __all__ as __all__
