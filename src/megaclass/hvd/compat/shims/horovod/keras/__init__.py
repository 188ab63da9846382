from megaclass.hvd.compat.util import check_extension

check_extension("horovod.keras", "HOROVOD_WITH_TENSORFLOW", __file__)
