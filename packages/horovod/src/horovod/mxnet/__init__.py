from horovod.common.util import check_extension

check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", __file__)
