from megaclass.hvd.tensorflow.compression import Compression, Compressor, FP16Compressor, NoneCompressor
