"""What a rewrite uses, in the forward of a model: by a name that torch.compile can trace."""

from __future__ import annotations

import importlib
import sys
from types import FunctionType

import pytest

from rlhf_patches.engine import uses
from rlhf_patches.guards.edits import Edit

TEXT = '__import__("json.encoder", fromlist=("*",)).py_encode_basestring("x")'


def function(name):
    scope = {}
    exec(f"def {name}(): pass", scope)
    made = scope[name]
    assert isinstance(made, FunctionType)
    return made


def test_a_forward_reaches_it_by_a_name_of_its_module():
    forward = function("forward")
    (edit,) = uses.by_name(forward, [Edit(0, 0, TEXT)])
    assert "__import__" not in edit.text
    assert eval(edit.text, forward.__globals__) == '"x"'


def test_other_functions_keep_their_text():
    assert uses.by_name(function("training_step"), [Edit(0, 0, TEXT)]) == [Edit(0, 0, TEXT)]


def test_what_is_not_called_keeps_its_text():
    edits = [Edit(0, 0, TEXT.removesuffix('("x")'))]
    assert uses.by_name(function("forward"), edits) == edits


@pytest.mark.parametrize("imported", [True, False])
def test_what_is_not_imported_yet_is_when_it_is_called(tmp_path, monkeypatch, imported):
    name = f"used_later_{imported}"
    (tmp_path / f"{name}.py").write_text("def twice(number, *, more=0):\n    return 2 * number + more\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    if imported:
        importlib.import_module(name)
    forward = function("forward")
    (edit,) = uses.by_name(forward, [Edit(0, 0, f'__import__("{name}", fromlist=("*",)).twice(4, more=1)')])
    assert (name in sys.modules) is imported
    assert eval(edit.text, forward.__globals__) == 9
    assert sys.modules.pop(name)
