"""Horovod's callbacks for model.fit(): those of megaclass.hvd.tensorflow.keras."""

from megaclass.hvd.tensorflow.keras.callbacks import *
from megaclass.hvd.tensorflow.keras.callbacks import __all__ as __all__
