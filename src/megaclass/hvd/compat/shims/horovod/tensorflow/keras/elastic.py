from megaclass.hvd.tensorflow.keras.elastic import *
