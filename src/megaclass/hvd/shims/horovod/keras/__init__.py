from megaclass.hvd.horovod_util import check_extension

check_extension("horovod.keras", "HOROVOD_WITH_TENSORFLOW", __file__)
