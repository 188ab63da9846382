from megaclass.hvd.compat.data import AsyncDataLoaderMixin, BaseDataLoader
