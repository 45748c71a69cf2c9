"""``rlhf-patches new --from-diff`` on real fixes: the diff between two releases that lie side by side.

That what is drafted makes of a function what the later release has is checked here on the trees that Python's own
parser gives, docstrings aside. Text alone: nothing of a release is imported.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import sys
from pathlib import Path

import pytest

from rlhf_patches import Rewrite, cli
from rlhf_patches.definitions import registry
from rlhf_patches.guards import shapes, sources
from rlhf_patches.guards.edits import edited
from rlhf_patches.guards.places import Source
from tests.harness import side_by_side

FIXES = {
    "verl-reinforce-plus-plus-turns": (
        "verl-0.8",
        None,
        "verl.trainer.ppo.core_algos:compute_reinforce_plus_plus_outcome_advantage",
    ),
    "transformer-engine-cross-entropy-backward": (
        "transformer-engine-2.10",
        "transformer-engine-2.11",
        "transformer_engine.pytorch.triton.cross_entropy:cross_entropy_backward",
    ),
    "swift-kto-sequence-parallel": (
        "swift-3.12",
        "swift-4.3",
        "swift.megatron.trainers.kto_trainer:MegatronKTOTrainer.forward_step",
    ),
}
"""By the built-in patch for the bug: the release with it, the one without (None: the environment's), the function."""


def source(release, module):
    path = Path(*module.split(".")).with_suffix(".py")
    if release is None:
        folder = Path(importlib.util.find_spec(module.partition(".")[0]).origin).parents[1]
    else:
        folder = side_by_side.folder(release)
    return Source(module, str(folder / path), (folder / path).read_text())


def tree(text, qualname):
    node = sources.find_function(text, qualname)
    if ast.get_docstring(node) is not None:
        del node.body[0]
    return ast.dump(node)


@pytest.mark.parametrize("name", FIXES)
def test_a_real_fix_is_drafted(name, tmp_path, capsys, monkeypatch):
    before, after, target = FIXES[name]
    (built_in,) = (item.patch for item in registry.load()[0] if item.patch.name == name)
    assert target in [change.target for variant in built_in.variants for change in variant.changes]
    module, _, qualname = target.partition(":")
    old, new = source(before, module), source(after, module)
    path = module.replace(".", "/") + ".py"
    lines = difflib.unified_diff(old.text.splitlines(True), new.text.splitlines(True), f"a/{path}", f"b/{path}")
    (tmp_path / "fix.patch").write_text("".join(lines))
    monkeypatch.chdir(tmp_path)
    release = str(side_by_side.folder(before))
    status = cli.main(["new", "real-fix", "--from-diff", "fix.patch", "--in", release])
    said, complaint = capsys.readouterr()
    assert status == 0, complaint
    assert f"drafted: {target}, " in said

    monkeypatch.syspath_prepend(str(tmp_path / "real-fix"))
    for loaded in ("rlhf_patches_real_fix", "rlhf_patches_real_fix.patch"):
        monkeypatch.delitem(sys.modules, loaded, raising=False)
    patch = importlib.import_module("rlhf_patches_real_fix.patch").PATCH
    (variant,) = patch.variants
    assert patch.distribution.replace("_", "-") == built_in.distribution
    assert any(variant.guard.shares_a_version_with(other.guard) for other in built_in.variants)
    changes = [change for change in variant.changes if change.target == target and "TODO:" not in change.pattern]
    assert changes
    assert all(isinstance(change, Rewrite) for change in changes)
    edits = [edit for change in changes for edit in shapes.recognize(change, old).edits]
    made = old._replace(text=edited(old.text, edits))
    assert tree(made, qualname) == tree(new, qualname) != tree(old, qualname)
