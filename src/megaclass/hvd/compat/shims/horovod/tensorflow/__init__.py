from megaclass.hvd.compat.util import check_extension

check_extension("horovod.tensorflow", "HOROVOD_WITH_TENSORFLOW", __file__)
