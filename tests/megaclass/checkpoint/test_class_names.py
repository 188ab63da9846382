"""Names of classes: saved, matched, and told apart."""

import itertools
import random

import pytest

from megaclass.checkpoint.class_names import ClassList, describe_difference, describe_match, match_classes
from megaclass.errors import CheckpointError


def listed(*names):
    return ClassList.of((name.encode() for name in names), "here")


def test_names_come_back_in_order_and_without_names_numbers_stand_in():
    assert list(listed("Ada", "Bo ü", "0").names()) == [b"Ada", "Bo ü".encode(), b"0"]
    assert list(ClassList(3).names()) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("name", ["", "a\nb"])
def test_a_name_that_no_line_can_hold_is_refused(name):
    with pytest.raises(CheckpointError, match=r"Class 1 of here has the name"):
        listed("fine", name)


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_every_class_finds_itself_whatever_the_cut(num_ranks):
    chance = random.Random(0)
    saved_names = [f"person {number}" for number in range(50)]
    names = chance.sample(saved_names, 40) + [f"new {number}" for number in range(7)]
    chance.shuffle(names)
    saved, current = listed(*saved_names), listed(*names)
    bounds = [len(names) * rank // num_ranks for rank in range(num_ranks + 1)]
    parts = [match_classes(saved, current, a, b) for a, b in itertools.pairwise(bounds)]
    found = [number for part in parts for number in part.saved_K.tolist()]
    assert found == [saved_names.index(name) if name in saved_names else -1 for name in names]
    assert sum(part.num_new for part in parts) == 7
    assert sum(part.num_same + part.num_renumbered for part in parts) == 40


def test_numbers_match_numbers_when_classes_are_added_or_dropped():
    assert match_classes(ClassList(3), ClassList(5), 0, 5).saved_K.tolist() == [0, 1, 2, -1, -1]
    assert match_classes(ClassList(5), ClassList(3), 1, 3).saved_K.tolist() == [1, 2]


@pytest.mark.parametrize(("start", "stop"), [(0, 3), (0, 2), (2, 3), (1, 2)])
def test_two_classes_of_one_name_are_refused_on_whichever_ranks_they_lie(start, stop):
    with pytest.raises(CheckpointError, match="Two classes of the data have the name 'Ada'"):
        match_classes(listed("Ada"), listed("Ada", "Bo", "Ada"), start, stop)


def test_the_difference_is_told_in_words_and_is_empty_for_equal_lists():
    assert describe_difference(listed("a", "b"), listed("a", "b")) == ""
    assert describe_difference(ClassList(4), ClassList(4)) == ""
    difference = describe_difference(listed("a", "b", "c", "d", "e", "f"), listed("f", "x"))
    assert difference == (
        "6 classes were saved, the data has 2; 1 new (x); 5 gone (a, b, c, …); 1 with another number. "
        "--match-classes keeps the centres of those with the same name"
    )


def test_where_there_are_no_names_it_is_said_that_numbers_are_matched():
    assert describe_difference(ClassList(3), ClassList(4)) == (
        "3 classes were saved, the data has 4; 1 new (3). --match-classes keeps the centres of those with the same number; "
        "names would come from a file classes.txt beside the data"
    )
    assert "identified by name, those of the data by number. A file classes.txt" in describe_difference(
        listed("a", "b"), ClassList(2)
    )


def test_the_table_says_how_many_of_each():
    assert describe_match(1000, 20, 3, 1030) == (
        "  kept, under the same number  1,000\n"
        "  kept, renumbered                20\n"
        "  new, initialised                 3\n"
        "  gone, dropped                   10"
    )
