"""The old place of Horovod's API, which is the import package `horovod` now."""

raise ImportError(
    "megaclass.hvd is the import package `horovod` now: pip install megaclass[horovod], then "
    "`import horovod.torch as hvd` instead of `import megaclass.hvd as hvd`."
)
