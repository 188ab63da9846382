from megaclass.hvd.tensorflow.elastic import *
from megaclass.hvd.tensorflow.elastic import HorovodInternalError, ObjectState, broadcast_object, broadcast_object_fn
