from megaclass.hvd.compression import Compression, Compressor, FP16Compressor, NoneCompressor
