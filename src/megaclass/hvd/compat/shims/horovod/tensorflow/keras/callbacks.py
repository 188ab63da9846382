from megaclass.hvd.tensorflow.keras.callbacks import *
