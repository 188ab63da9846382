from megaclass.hvd.keras.callbacks import *
