"""What the classes of the data are called, so that their centres are found again when the list has changed."""

from megaclass.checkpoint.class_names import ClassList
from megaclass.data.sources.open_source import format_of
from megaclass.data.sources.source import ImageSource
from megaclass.errors import DataError


def class_list(path: str, source: ImageSource) -> ClassList:
    """Names from a classes.txt beside the data, or from its folders where each is an identity.

    Where there are none (a train.rec and its property file know numbers only), a class is called by its number.
    """
    names = format_of(path).class_names()
    if names is None:
        return ClassList(source.num_classes)
    classes = ClassList.of(names, path)
    if classes.num_classes != source.num_classes:
        raise DataError(f"{path} names {classes.num_classes:,} classes, but its labels are of {source.num_classes:,}.")
    return classes
