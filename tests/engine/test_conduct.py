"""What the contract tells from a patch's text: waits without a bound, and writes to what the user holds."""

from __future__ import annotations

import sys
import textwrap

import pytest

from rlhf_patches import Guard, Patch, Replace, Rewrite, Variant, Wrap
from rlhf_patches.testing import conduct

KNOWN = dict(name="toy-bug", summary="s", symptom="s", cause="c", repair="r", references=("r",), obsolete_when="r")
WRAP, REPLACE = Wrap, Replace


def patch(*changes, **fields):
    return Patch(variants=(Variant(Guard("toy", "<2"), changes),), **{**KNOWN, **fields})


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A plugin's package on sys.path, under a name that no test had before; it is never imported."""
    name = f"toy_plugin_{abs(hash(str(tmp_path)))}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)

    def write(**modules):
        for module, text in modules.items():
            path = folder / f"{module}.py"
            path.write_text(textwrap.dedent(text))
        return name

    yield write
    assert name not in sys.modules


def wrap(name, function="around"):
    return Wrap("toy:f", f"{name}.repair:{function}", signature="(x)", signature_suffices="any body")


def replace(name, function="instead"):
    return Replace("toy:f", f"{name}.repair:{function}", {"0" * 16: "1.0"})


def found(look, *changes, **fields):
    return [(each.file.rpartition("/")[2], each.line, each.what) for each in look(patch(*changes, **fields))]


WAITS = {
    "a lock": "with lock: pass",
    "a lock of an object": "with instance.state.lock: pass",
    "a lock by its name": "with args[0].cache_lock: pass",
    "a lock in a tuple": "with second: pass",
    "a lock among others": "with open('f') as file, guard: pass",
    "acquire": "guard.acquire()",
    "acquire for ever": "guard.acquire(timeout=None)",
    "acquire by position": "guard.acquire(True)",
    "acquire for -1": "guard.acquire(timeout=-1)",
    "an event": "event.wait()",
    "an event for ever": "event.wait(None)",
    "a condition": "condition.wait_for(ready)",
    "a thread": "thread.join()",
    "a queue": "inbox.get()",
    "a queue, blocking": "inbox.get(timeout=None)",
    "a future": "future.result()",
    "a process": "process.communicate()",
    "a file lock": "with FileLock('f'): pass",
}
NO_WAITS = {
    "acquire for a time": "guard.acquire(timeout=1)",
    "acquire for a time by position": "guard.acquire(True, 1)",
    "acquire or not": "guard.acquire(blocking=False)",
    "acquire or not by position": "guard.acquire(False)",
    "an event": "event.wait(1)",
    "a condition": "condition.wait_for(ready, timeout=1)",
    "a thread": "thread.join(timeout=1)",
    "text": "', '.join(args)",
    "a path": "os.path.join('a', 'b')",
    "a queue": "inbox.get(timeout=1)",
    "a queue or not": "inbox.get(block=False)",
    "a dictionary": "kwargs.get('x')",
    "a context variable": "variable.get()",
    "a future": "future.result(1)",
    "a process": "process.communicate(timeout=1)",
    "no lock": "with torch.no_grad(): pass",
    "a block": "with instance.block: pass",
    "a file lock for a time": "with FileLock('f', timeout=1): pass",
    "said on the line": "with guard: pass  # waits: held for one assignment",
    "said above": "# waits: held for one assignment\n    with guard: pass",
}
WAITING = """\
import contextvars, threading
guard, second = threading.Lock(), threading.RLock()
variable = contextvars.ContextVar("v")
def around(wrapped, instance, args, kwargs):
    {}
    return wrapped(*args, **kwargs)
"""


@pytest.mark.parametrize("code", WAITS.values(), ids=WAITS)
def test_a_wait_without_a_bound_is_named_with_file_and_line(package, code):
    name = package(repair=WAITING.format(code))
    ((file, line, said),) = found(conduct.waits, wrap(name))
    assert (file, line) == ("repair.py", 5)
    assert said.endswith("` waits without a bound")


@pytest.mark.parametrize("code", NO_WAITS.values(), ids=NO_WAITS)
def test_a_wait_that_ends_is_none(package, code):
    name = package(repair=WAITING.format(code))
    assert found(conduct.waits, wrap(name)) == []


@pytest.mark.parametrize("said", ["# waits:", "# waits: no", "# awaits: that it is held for one", "# writes: for once"])
def test_a_comment_that_gives_no_reason_is_none(package, said):
    name = package(repair=WAITING.format(f"with guard: pass  {said}"))
    assert len(found(conduct.waits, wrap(name))) == 1


WRITES = {
    "an attribute": "instance.model.x = 1",
    "an item": "instance.state['x'] = 1",
    "an item of an argument": "args[0]['x'] = 1",
    "a part of one": "args[0].x.y += 1",
    "an attribute less": "del instance.x",
    "a name for it": "model = instance.model; model.x = 1",
    "one of several": "model, *rest = args; model.x = 1",
    "an annotated one": "model: object = args[0]; model.x = 1",
    "its own dictionary": "vars(instance)['x'] = 1",
    "a list of it": "instance.hooks.append(1)",
    "a dictionary of it": "instance.__dict__.update(x=1)",
    "below the model": "for module in instance.model.modules(): module.training = False",
    "one with its name": "for name, one in list(args[0].named_parameters()): one.data = one.data.float()",
    "collected first": "found = [(n, m) for n, m in instance.named_modules()]\n    for n, m in found: m.x = 1",
    "kept by name": "kept = {}; kept['m'] = instance\n    for m in kept.values(): m.x = 1",
    "the first": "next(iter(instance.children())).x = 1",
    "what getattr gives": "getattr(instance, 'model').x = 1",
    "in a finally": "try: pass\n    finally: instance.x = 1",
    "in a branch": "if args: instance.x = 1",
    "as a target": "with open('f') as instance.file: pass",
    "in place": "args[0].data.copy_(args[1])",
    "setattr": "setattr(instance, 'x', 1)",
    "setattr of anything": "setattr(make(), 'x', 1)",
    "object.__setattr__": "instance.__setattr__('x', 1)",
    "unwrap_model": "instance.accelerator.unwrap_model(instance.model)",
    "accelerate's own": "extract_model_from_parallel(args[0])",
    "train": "args[0].train()",
    "train(False)": "args[0].train(False)",
    "eval": "args[0].eval()",
    "requires_grad_": "parameter.requires_grad_(False)",
    "a hook": "make().register_full_backward_hook(print)",
    "a buffer": "make().register_buffer('b', None)",
    "to": "make().to('cpu')",
    "half": "args[0].half()",
    "an adapter": "make().set_adapter('default')",
    "by a function of the module": "helper(args[0])",
    "by one with a keyword": "helper(value=2, model=args[0])",
    "by one of another module": "elsewhere(args[0])",
    "in a function that it makes": "def inner(): instance.x = 1",
}
NO_WRITES = {
    "its own arguments": "kwargs['x'] = 1; kwargs.pop('y', None)",
    "a list of its own": "found = list(instance.modules()); found.append(1); found[0] = None",
    "a dictionary of its own": "found = {'x': instance}; found['y'] = 1; found.update(z=2)",
    "a copy": "ids = args[0]; ids = ids.clone(); ids[0] = 1; ids.add_(1)",
    "an object of its own": "made = make(instance); made.x = 1",
    "a number": "count = args[0]; count += 1",
    "what to() gives": "model = args[0].to('cpu')",
    "what is detached": "some = args[0].detach().requires_grad_()",
    "eval of a text": "eval('1')",
    "a method called train": "args[0].train(1, 2)",
    "a name of the same kind": "pandas.eval('1')",
    "by a function that only reads": "reads(args[0])",
    "said on the line": "args[0].eval()  # writes: the mode is the repair",
    "said above": "# writes: the mode is the repair\n    args[0].eval()",
}
WRITING = """\
from .other import elsewhere
def around(wrapped, instance, args, kwargs):
    {}
    return wrapped(*args, **kwargs)
def helper(model, value=1):
    model.x = value
def reads(model):
    found = dict(vars(model))
    found["x"] = 1
    return found
class Own:
    def __init__(self):
        self.x = 1
"""
OTHER = "def elsewhere(one):\n    one.x = 1\n"


@pytest.mark.parametrize("code", WRITES.values(), ids=WRITES)
def test_a_write_to_what_the_user_holds_is_named_with_file_and_line(package, code):
    name = package(repair=WRITING.format(code), other=OTHER)
    places = {(file, line) for file, line, _ in found(conduct.writes, wrap(name))}
    (place,) = places
    lines = code.count("\n")
    helper, other = ("repair.py", 6 + lines), ("other.py", 2)
    expected = {"helper": helper, "elsewhere": other}.get(code.partition("(")[0])
    assert place == expected if expected else place in {("repair.py", 3 + number) for number in range(lines + 1)}


@pytest.mark.parametrize("code", NO_WRITES.values(), ids=NO_WRITES)
def test_what_is_its_own_it_may_write(package, code):
    name = package(repair=WRITING.format(code), other=OTHER)
    assert found(conduct.writes, wrap(name)) == []


@pytest.mark.parametrize("above", ["# writes: this is the repair\n", "# writes: it is\n@decorated\n", ""])
def test_a_comment_of_a_function_is_for_all_that_it_does(package, above):
    text = (
        f"{above}def around(wrapped, instance, args, kwargs):{{}}\n    args[0].eval()\n    instance.x = args[0].y = 1\n"
    )
    name = package(repair=text.format("" if above else "  # writes: this is the repair"))
    assert found(conduct.writes, wrap(name)) == []
    name = package(other=f"{text.format('')}def elsewhere(x):\n    x.y = 1\n", repair=OTHER)
    change = Wrap("toy:f", f"{name}.other:around", signature="(x)", signature_suffices="any body")
    assert len(found(conduct.writes, change)) == (0 if above else 3)


def test_what_is_looked_at_is_what_the_patch_runs(package):
    """Implementations of each kind, observations, what they use of their own package; nothing else of it."""
    name = package(
        repair="""\
            from . import shared
            from .names import through as renamed
            import queue
            def around(wrapped, instance, args, kwargs):
                return shared.used(wrapped)
            def instead(self, x):
                self.x = 1
                return renamed()
            def used(x):
                x.y = 1
            def observed():
                return queue.Queue().get()
            def unused(x):
                x.y = 1
                lock.acquire()
            """,
        shared="""\
            def used(call):
                pool.acquire()
                return Kept(call)
            def unused():
                pool.acquire()
            class Kept:
                def __init__(self, call):
                    call.future.result()
            pool.acquire()
            """,
        names="from .shared import through\n",
    )
    changes = (wrap(name), replace(name), Rewrite("toy:f", "a", "$USED(a)", uses={"USED": f"{name}.repair:used"}))
    assert found(conduct.waits, *changes, observations=f"{name}.repair:observed") == [
        ("repair.py", 12, "`queue.Queue().get()` waits without a bound"),
        ("shared.py", 2, "`pool.acquire()` waits without a bound"),
        ("shared.py", 8, "`call.future.result()` waits without a bound"),
        ("shared.py", 9, "`pool.acquire()` waits without a bound"),
    ]
    assert found(conduct.writes, *changes) == [
        ("repair.py", 7, "`self.x` is assigned to, which belongs to an argument"),
        ("repair.py", 10, "`x.y` is assigned to, which belongs to an argument"),
    ]


def test_what_is_not_there_is_told_elsewhere(package):
    name = package(repair="def other(): pass\n", broken="def around(: pass\n")
    for implementation in (f"{name}.repair:around", f"{name}.nothing:around", f"{name}.broken:around"):
        change = Wrap("toy:f", implementation, signature="(x)", signature_suffices="any")
        assert found(conduct.waits, change) == found(conduct.writes, change) == []


def test_a_rewrite_without_functions_has_nothing_to_look_at():
    assert found(conduct.waits, Rewrite("toy:f", "a", "b")) == found(conduct.writes, Rewrite("toy:f", "a", "b")) == []


INFERRED = {
    "a class by its name": "type(instance).__name__ == 'Trainer'",
    "a module by its name": "type(instance).__module__.startswith('transformers')",
    "names in code": "'count' in instance.loss.__code__.co_names",
    "a signature": "'count' in inspect.signature(instance.loss).parameters",
    "who has called": "sys._getframe(1).f_code.co_name == 'train'",
    "what a loss was made by": "kwargs['loss'].grad_fn.next_functions",
}
DECIDING = """\
import inspect, sys
{}def around(wrapped, instance, args, kwargs):
    if {}:
        pass{}
    return wrapped(*args, **kwargs)
"""


@pytest.mark.parametrize("code", INFERRED.values(), ids=INFERRED)
def test_what_goes_by_a_name_or_a_graph_is_found_unless_it_is_said_why_that_tells(package, code):
    for above, behind, is_said in (
        ("", "", False),
        ("# known:\n", "", False),
        ("# known: it is a class of our own\n", "", True),
        ("# known here: classes of our own\n\n", "", True),
        ("", "  # known: not on the line\n", False),
    ):
        name = package(repair=DECIDING.format(above, code, behind))
        inferred = found(conduct.inferences, wrap(name))
        assert inferred
        assert found(conduct.unknown, wrap(name)) == ([] if is_said else inferred)


@pytest.mark.parametrize("code", ["isinstance(instance, dict)", "instance.__name__", "print(type(instance).__name__)"])
def test_what_is_asked_of_the_object_or_only_told_is_no_inference(package, code):
    assert found(conduct.inferences, wrap(package(repair=DECIDING.format("", code, "")))) == []


def test_attributes_that_are_set_are_found_by_name(package):
    code = """\
_MARK = "ours"
def around(wrapped, instance, args, kwargs):
    instance.a = instance.b.c = 1
    setattr(instance, _MARK, True)
    setattr(instance, "d", instance.e)
    return wrapped(*args, **kwargs)
class Own:
    def __init__(self):
        self.f = 1
"""
    assert conduct.attributes(patch(wrap(package(repair=code)))) == {"a", "c", "ours", "d"}
