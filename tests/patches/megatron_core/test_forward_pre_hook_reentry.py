"""The patch on a real DistributedDataParallel: what it must still refuse, and keeping away."""

from __future__ import annotations

import importlib.metadata
import inspect
import shutil
import traceback
from pathlib import Path

import pytest

import rlhf_patches
from tests.harness import look_alikes
from tests.harness.forkserver import PACKAGES, Level
from tests.harness.logs import diagnosed

RULE_COVERAGE = {
    "minimal scope": "test_without_overlap_param_gather_both_calls_raise_as_before",
    "no side effects": "test_either_call_in_either_state",
    "backward compatible": ("test_either_call_in_either_state", "test_a_half_registered_state_still_raises"),
    "no new blocking": "test_parameters_are_synchronized_when_asked_for",
    "as before": "test_a_half_registered_state_still_raises",
}

pytestmark = pytest.mark.xdist_group("a chunk in this process")
NAME = "megatron-core-forward-pre-hook-reentry"
KEEPING_AWAY = "tests.harness.keeping_away_ranks"
MODULE = "megatron.core.distributed.distributed_data_parallel"


@pytest.fixture(scope="module")
def chunk(tmp_path_factory):
    """A data-parallel chunk with its forward pre-hooks, in a world of one rank."""
    import torch

    from tests.harness import rollout_training as harness

    arguments = harness.parse(["--out", str(tmp_path_factory.mktemp("unused"))])
    harness.prepare(arguments)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
            patch.setenv(name, value)
        harness.start_megatron(arguments)
    yield harness.make_trainee(arguments, "actor", harness.make_config(), seed=1).chunks[0]
    torch.distributed.destroy_process_group()


@pytest.fixture
def patched(chunk):
    """The chunk, patched although it was made before apply(), with its hooks registered."""
    report = rlhf_patches.apply(only=NAME)
    assert report[NAME].status is rlhf_patches.Status.APPLIED, report[NAME]
    yield chunk
    rlhf_patches.revert()
    for handle in chunk.remove_forward_pre_hook_handles.values():
        handle.remove()
    chunk.remove_forward_pre_hook_handles.clear()
    chunk.enable_forward_pre_hook()


def hooks(chunk) -> int:
    return sum(len(module._forward_pre_hooks) for module in chunk.module.modules())


def modules(chunk) -> int:
    return len(list(chunk.module.modules()))


def test_unpatched_both_calls_raise(chunk):
    with pytest.raises(AssertionError) as enabled:
        chunk.enable_forward_pre_hook()
    chunk.disable_forward_pre_hook()
    with pytest.raises(KeyError) as disabled:
        chunk.disable_forward_pre_hook()
    chunk.enable_forward_pre_hook()
    for raised in (enabled, disabled):
        text = "".join(traceback.format_exception(raised.value))
        assert diagnosed(text) == [(NAME, True)]
        assert diagnosed(text.splitlines()[-1]) == [], "anything raises a KeyError"


def test_either_call_in_either_state(patched):
    assert hooks(patched) == modules(patched)
    patched.enable_forward_pre_hook()
    assert hooks(patched) == modules(patched), "no module got a second hook"
    patched.disable_forward_pre_hook()
    assert hooks(patched) == 0
    patched.disable_forward_pre_hook()
    assert hooks(patched) == 0
    patched.enable_forward_pre_hook()
    assert hooks(patched) == len(patched.remove_forward_pre_hook_handles) == modules(patched)


def test_parameters_are_synchronized_when_asked_for(patched, monkeypatch):
    calls = []
    original = type(patched).start_param_sync
    monkeypatch.setattr(
        type(patched), "start_param_sync", lambda self, *a, **k: (calls.append(k), original(self, *a, **k))[1]
    )
    patched.disable_forward_pre_hook()
    patched.disable_forward_pre_hook()
    assert calls == [{"force_sync": True}] * 2
    if "param_sync" in inspect.signature(patched.disable_forward_pre_hook).parameters:
        patched.disable_forward_pre_hook(param_sync=False)
        assert len(calls) == 2


@pytest.mark.parametrize("lost", ["first", "last", "foreign"])
def test_a_half_registered_state_still_raises(patched, lost):
    handles = patched.remove_forward_pre_hook_handles
    if lost == "foreign":  # a handle of a module that is not the chunk's
        handles[object()] = handles[next(iter(handles))]
    else:
        key = list(handles)[0 if lost == "first" else -1]
        handles.pop(key).remove()
    with pytest.raises(AssertionError):
        patched.enable_forward_pre_hook()
    with pytest.raises((AssertionError, KeyError)):
        patched.disable_forward_pre_hook()


def test_without_overlap_param_gather_both_calls_raise_as_before(patched, monkeypatch):
    name = "use_forward_hook" if hasattr(patched, "use_forward_hook") else "overlap_param_gather"
    with monkeypatch.context() as without:
        without.setattr(patched, name, False)
        for call in (patched.enable_forward_pre_hook, patched.disable_forward_pre_hook):
            with pytest.raises(AssertionError):
                call()


def test_reverted_both_calls_raise_again(chunk):
    codes = [getattr(type(chunk), f"{verb}_forward_pre_hook").__code__ for verb in ("enable", "disable")]
    rlhf_patches.apply(only=NAME)
    rlhf_patches.revert()
    assert [getattr(type(chunk), f"{verb}_forward_pre_hook").__code__ for verb in ("enable", "disable")] == codes
    test_unpatched_both_calls_raise(chunk)


# ------------------------------------------------------------------------------------- keeping away


@pytest.fixture(scope="module")
def copy_of_megatron(tmp_path_factory):
    """Makes copies of the installed megatron-core that call themselves another version, edited or not."""
    spec = importlib.metadata.distribution("megatron-core")
    source = Path(str(spec.locate_file("megatron")))

    def make(version: str, old: str = "", new: str = "") -> Path:
        site = tmp_path_factory.mktemp("site")
        shutil.copytree(source, site / "megatron", ignore=shutil.ignore_patterns("bridge"))
        look_alikes.write_metadata(site, "megatron-core", version)
        file = site.joinpath(*MODULE.split(".")).with_suffix(".py")
        file.write_text(look_alikes.replacing(old, new)(file.read_text()))
        return site

    return make


LOOP = "        for module in self.module.modules():\n            assert self.remove_forward_pre_hook_handles[module]"
FIXED = (
    "        if not self.remove_forward_pre_hook_handles:\n            return\n"
    "        for module in list(self.module.modules()):\n"
    "            assert self.remove_forward_pre_hook_handles[module]"
)


def test_a_checkout_that_is_repaired_is_left_alone(tmp_path):
    row = look_alikes.doctor_row(tmp_path, NAME, version="not-a-version", edit=look_alikes.replacing(LOOP, FIXED))
    assert row["status"] == "unaffected"


@pytest.mark.parametrize(
    ("version", "edit", "status"),
    [
        ("0.16.1", (), "applied"),  # shows that the other is not left alone for want of a working copy
        ("0.16.1", (LOOP, FIXED), "refused"),
    ],
)
def test_keeping_away(run_ranks, copy_of_megatron, version, edit, status):
    site = copy_of_megatron(version, *edit)
    levels = (*PACKAGES, Level("tests.harness.loading:torch", str(site)))
    prepare = "tests.harness.megatron_on_cpu:install"
    (found,) = run_ranks(KEEPING_AWAY, NAME, MODULE, prepare, levels=levels, ranks=1)
    assert found["file"].startswith(str(site))
    assert found["status"] == status
    assert found["as written"] == [status != "applied"] * 2
