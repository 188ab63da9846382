from megaclass.hvd.keras.elastic import *
