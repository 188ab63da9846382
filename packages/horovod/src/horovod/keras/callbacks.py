"""Horovod's callbacks for model.fit(): those of horovod.tensorflow.keras."""

from horovod.tensorflow.keras.callbacks import *
from horovod.tensorflow.keras.callbacks import __all__ as __all__
