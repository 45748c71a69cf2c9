"""`untouched`: each kind of change to what a user holds is said with its path; what is no change is not."""

from __future__ import annotations

import collections
import logging
import re
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest

from rlhf_patches.testing import untouched


class Inner:
    def __init__(self, value=0):
        self.value = value

    def method(self):
        return self.value


class Other(Inner):
    pass


class Slotted:
    __slots__ = ("__private", "first", "unset")

    def __init__(self):
        self.first = Inner()
        self.__private = Inner()

    def change(self):
        self.__private.value = 5


class Counting(dict):
    """A dictionary whose own methods must not be called."""

    def items(self):
        raise AssertionError("called")

    __iter__ = __len__ = items


def make():
    trainer = SimpleNamespace(
        model=Inner(),
        slotted=Slotted(),
        plain=1,
        nan=float("nan"),
        items=[Inner(), Inner()],
        by_name={"a": Inner(), "b": 2},
        pair=(Inner(), 1.5),
        names={"x", "y"},
        chosen={Inner()},
        due=collections.deque([Inner()]),
        counting=Counting(a=Inner()),
        nested=SimpleNamespace(deep=[{"k": (Inner(),)}]),
    )
    trainer.model.trainer = trainer  # a cycle
    return trainer


CHANGES = {
    "a value": (lambda t: setattr(t, "plain", 2), "trainer.plain has changed: 1 before, 2 now"),
    "an equal value of another type": (lambda t: setattr(t, "plain", 1.0), "trainer.plain has changed: 1 before, 1.0"),
    "a value for an object": (
        lambda t: setattr(t, "model", None),
        "trainer.model has changed: Inner before, None now",
    ),
    "another object": (
        lambda t: setattr(t, "model", Other()),
        "trainer.model is another object: Inner before, Other now",
    ),
    "a copy": (
        lambda t: setattr(t, "by_name", dict(t.by_name)),
        "trainer.by_name is another object: dict before, dict now",
    ),
    "another class": (
        lambda t: setattr(t.model, "__class__", Other),
        "trainer.model has another class: Inner before, Other now",
    ),
    "a new attribute": (lambda t: setattr(t.model, "cache", 3), "trainer.model.cache is new: 3"),
    "a new object": (lambda t: setattr(t.model, "cache", Inner()), "trainer.model.cache is new: Inner"),
    "an attribute less": (lambda t: delattr(t.model, "value"), "trainer.model.value is gone: 0 before"),
    "a method of its own": (lambda t: setattr(t.model, "method", len), "trainer.model.method is new: builtin"),
    "an element": (lambda t: t.items.append(1), "trainer.items[2] is new: 1"),
    "an element less": (lambda t: t.items.pop(), "trainer.items[1] is gone: Inner before"),
    "an order": (lambda t: t.items.reverse(), "trainer.items[0] is another object: Inner before, Inner now"),
    "in an element": (lambda t: setattr(t.items[1], "value", 1), "trainer.items[1].value has changed: 0 before, 1"),
    "a key": (lambda t: t.by_name.update(c=3), "trainer.by_name['c'] is new: 3"),
    "a key less": (lambda t: t.by_name.pop("b"), "trainer.by_name['b'] is gone: 2 before"),
    "an item": (lambda t: t.by_name.update(b=3), "trainer.by_name['b'] has changed: 2 before, 3 now"),
    "in an item": (lambda t: setattr(t.by_name["a"], "value", 1), "trainer.by_name['a'].value has changed"),
    "a tuple": (lambda t: setattr(t, "pair", (t.pair[0], 2.5)), "trainer.pair has changed: (<"),
    "in a tuple": (lambda t: setattr(t.pair[0], "value", 1), "trainer.pair[0].value has changed: 0 before, 1 now"),
    "a member": (lambda t: t.names.add("z"), "trainer.names{'z'} is new: 'z'"),
    "a member less": (lambda t: t.names.remove("x"), "trainer.names{'x'} is gone: 'x' before"),
    "another member": (lambda t: (t.chosen.clear(), t.chosen.add(Inner())), "trainer.chosen{Inner} is gone"),
    "in a member": (lambda t: setattr(next(iter(t.chosen)), "value", 1), "trainer.chosen{Inner}.value has changed"),
    "in a deque": (lambda t: setattr(t.due[0], "value", 1), "trainer.due[0].value has changed"),
    "in a dictionary of its own class": (
        lambda t: setattr(dict.__getitem__(t.counting, "a"), "value", 1),
        "trainer.counting['a'].value has changed",
    ),
    "a slot": (lambda t: setattr(t.slotted, "first", Inner()), "trainer.slotted.first is another object"),
    "a slot filled": (lambda t: setattr(t.slotted, "unset", 1), "trainer.slotted.unset is new: 1"),
    "a slot emptied": (lambda t: delattr(t.slotted, "first"), "trainer.slotted.first is gone: Inner before"),
    "in a private slot": (
        lambda t: t.slotted.change(),
        "trainer.slotted._Slotted__private.value has changed",
    ),
    "far down": (lambda t: setattr(t.nested.deep[0]["k"][0], "value", 1), "trainer.nested.deep[0]['k'][0].value has"),
}

OTHERS = {
    "trainer.items[0] is another object: Inner before, Inner now": [
        "trainer.items[1] is another object: Inner before, Inner now"
    ],
    "trainer.chosen{Inner} is gone": ["trainer.chosen{Inner} is new: Inner"],
}


@pytest.mark.parametrize(("change", "said"), CHANGES.values(), ids=CHANGES)
def test_each_change_is_said_with_its_path_and_nothing_else(change, said):
    trainer = make()
    with pytest.raises(AssertionError) as raised, untouched(trainer):
        change(trainer)
    first, *others = str(raised.value).splitlines()
    assert first.startswith(said)
    assert others == OTHERS.get(said, [])


def test_the_same_values_and_objects_are_no_change():
    trainer = make()
    with untouched(trainer):
        trainer.plain = int("1")
        trainer.nan = float("nan")
        trainer.pair = (trainer.pair[0], float("1.5"))  # equal, of the very same objects
        trainer.model.extra = Inner()
        del trainer.model.extra
        trainer.items[:] = list(trainer.items)


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        (("trainer.plain", "trainer.nested.deep"), True),
        (("trainer.plain", "trainer.nested.deep[0]['k'][0].*"), True),
        (("*.plain", "*.value"), True),
        (("trainer.plain", "trainer.nested"), True),
        (("trainer*",), True),
        (("trainer.plain",), False),
        (("trainer.nested.deep",), False),
        (("plain", "value"), False),
        (("trainer.plai?", "*.value"), False),
        (("trainer.plai", "*.value"), False),
        (("rainer.plain", "*.value"), False),
    ],
)
def test_what_may_change_is_named_by_its_path(changes, passes):
    trainer = make()

    def body():
        with untouched(trainer, changes=changes):
            trainer.plain = 2
            trainer.nested.deep[0]["k"][0].value = 1

    if passes:
        body()
    else:
        with pytest.raises(AssertionError, match=r"has changed"):
            body()


def test_a_path_begins_with_the_callers_name_or_the_class():
    first, holder = Inner(), SimpleNamespace(second=Inner())
    with pytest.raises(AssertionError) as raised, untouched(first, holder.second):
        first.value = holder.second.value = 1
    assert str(raised.value).splitlines() == [
        "first.value has changed: 0 before, 1 now",
        "Inner.value has changed: 0 before, 1 now",
    ]


def test_an_object_put_in_place_of_another_is_not_looked_into_and_the_old_one_is():
    trainer = make()
    old = trainer.model

    def change():
        trainer.model = Other(7)
        old.value = 1

    with pytest.raises(AssertionError) as raised, untouched(trainer):
        change()
    assert str(raised.value).splitlines() == [
        "trainer.model is another object: Inner before, Other now",
        "trainer.model.value has changed: 0 before, 1 now",
    ]


def test_what_the_body_raises_goes_on():
    trainer = make()

    def change():
        trainer.plain = 2
        raise KeyError("of the body")

    with pytest.raises(KeyError), untouched(trainer):
        change()


def test_what_is_no_users_is_compared_by_identity_only():
    logger = logging.getLogger("untouched")
    kept = Inner()
    holder = SimpleNamespace(
        logger=logger,
        module=sys,
        of_a_class=Inner,
        near=weakref.WeakValueDictionary(a=kept),
        call=lambda: None,
    )
    with untouched(holder):
        logger.setLevel(logging.DEBUG)
        sys.untouched_test = 1
        Inner.later = 1
        holder.near["b"] = kept
    del sys.untouched_test, Inner.later
    said = re.escape("holder.call is another object: function before, function")
    with pytest.raises(AssertionError, match=said), untouched(holder):
        holder.call = lambda: None


def test_a_long_chain_is_followed_as_far_as_it_is_told():
    head = link = Inner()
    for _ in range(3_000):
        link.next = Inner()
        link = link.next
    with untouched(head):
        link.value = 1
    with pytest.raises(AssertionError, match=r"next\.value has changed"), untouched(head, depth=4_000):
        link.value = 2


def test_a_long_list_of_differences_is_cut():
    many = [Inner() for _ in range(100)]

    def change():
        for each in many:
            each.value = 1

    with pytest.raises(AssertionError) as raised, untouched(many):
        change()
    lines = str(raised.value).splitlines()
    assert len(lines) == 21
    assert lines[-1] == "and 80 more"


def test_one_text_for_changes_is_refused():
    with pytest.raises(TypeError, match=r"expected a tuple of paths, such as \('a\.b',\)"):
        untouched(Inner(), changes="a.b")


def test_no_framework_is_imported():
    """Where the objects have brought none: in a process of its own."""
    code = "import sys; from rlhf_patches.testing import untouched\nwith untouched([1, {}]): pass\nprint(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not {"torch", "numpy", "pytest"} & set(ran.stdout.split())
