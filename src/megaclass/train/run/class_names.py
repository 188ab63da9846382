"""Names of the classes of the data, by which their centres are found again when the list of classes has changed."""

from megaclass.checkpoint.class_names import ClassList
from megaclass.data.sources.open_source import format_of
from megaclass.data.sources.source import ImageSource
from megaclass.errors import DataError


def class_list(path: str, source: ImageSource) -> ClassList:
    """Reads names from a classes.txt beside the data, or takes those of its folders if each is an identity.

    Without names (train.rec and its property file have numbers only), classes are identified by their numbers.
    """
    names = format_of(path).class_names()
    if names is None:
        return ClassList(source.num_classes)
    classes = ClassList.of(names, path)
    if classes.num_classes != source.num_classes:
        raise DataError(f"{path} names {classes.num_classes:,} classes, but has labels for {source.num_classes:,}.")
    return classes
