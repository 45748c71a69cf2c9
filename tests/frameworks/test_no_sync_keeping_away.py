"""The ``*-no-sync-reentry`` patches on the real ms-swift, Megatron-Bridge and verl: reverting, keeping away."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import look_alikes
import pytest

from rlhf_patches import Status, inspection, plugins

MESSAGE = "When overlap_grad_reduce is True, config.no_sync_func must be None"
SUPPORT = Path(__file__).parents[1] / "support"


@pytest.mark.parametrize("name", ["swift", "megatron_bridge", "verl"])
def test_reverted_the_real_function_is_itself_again(name):
    """On a reference taken before apply(): it raises, then does not, then raises again, with its own code."""
    code = f"""
import sys, os
sys.path.insert(0, {str(SUPPORT)!r})
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
import rollout_training as harness
args = harness.parse(["--out", "unused", "--no-overlap-param-gather"])
harness.prepare(args)
harness.start_megatron(args)
import framework_entries, rlhf_patches
function = framework_entries.function({name!r})
before = function.__code__
trainee = harness.make_trainee(args, "actor", harness.make_config(), 1)
def enter():
    install = getattr(framework_entries, "install_" + {name!r})
    try:
        install(trainee.chunks, trainee.config, trainee.optimizer, trainee.ddp_config, call=function)
    except AssertionError:
        return "raises"
    return "installs" if trainee.config.no_sync_func == trainee.chunks[0].no_sync else "leaves another's"
print(enter(), enter())
rlhf_patches.apply()
print(enter(), enter())
rlhf_patches.revert()
print(enter(), function.__code__ is before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-3:] == ["installs raises", "installs installs", "raises True"]


@pytest.mark.parametrize("name", ["swift", "megatron-bridge", "verl"])
@pytest.mark.parametrize(
    ("version", "fixed", "status"),
    [
        (None, False, "applies"),  # shows that the others are not left alone for want of a working copy
        ("0.0.1", False, "unaffected"),
        ("99.0", False, "unaffected"),
        (None, True, "refused"),
        ("unknown", True, "unaffected"),
    ],
)
def test_it_keeps_away(tmp_path, name, version, fixed, status):
    """From versions outside the guard, and from code that looks alike: what upstream's pull requests make of it."""
    assertion = r"assert (\w+)\.no_sync_func is None, \(([^)]*)\)\n"

    def edit(text: str) -> str:
        assert len(re.findall(assertion, text)) == 1
        return re.sub(assertion, r"if \1.no_sync_func is None: pass\n", text) if fixed else text

    row = look_alikes.doctor_row(tmp_path, f"{name}-no-sync-reentry", version=version, edit=edit)
    assert row["status"] == status, row
    assert ("This version was not read" in row["reason"]) == (status == "unaffected" and not fixed)


@pytest.mark.parametrize("patched", [False, True])
def test_verl_chunks_that_share_a_config(patched):
    """With virtual pipeline stages, verl trips over its own first chunk in the first call."""
    code = f"""
import sys, os
sys.path.insert(0, {str(SUPPORT)!r})
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
import rollout_training as harness
args = harness.parse(["--out", "unused", *(["--apply"] if {patched} else [])])
harness.prepare(args)
harness.start_megatron(args)
import framework_entries
hooks = framework_entries.function("verl")
config = harness.make_config()
one, two = (harness.make_trainee(args, "actor", config, seed) for seed in (1, 2))
chunks = [*one.chunks, *two.chunks]
try:
    hooks(chunks, one.optimizer)
except AssertionError as error:
    print("raised", error)
else:
    print(config.no_sync_func == [chunk.no_sync for chunk in chunks])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    if patched:
        assert done.stdout.strip() == "True"
    else:
        assert done.stdout.startswith(f"raised {MESSAGE}")


def test_doctor_recognises_what_is_installed():
    """The static check, on the real installed packages, and without importing them."""
    report = inspection.inspect(*plugins.load())
    for name in ("swift", "megatron-bridge", "verl"):
        assert report[f"{name}-no-sync-reentry"].status is Status.APPLIES, report[f"{name}-no-sync-reentry"]
    assert report["swift-train-no-sync-reentry"].status is Status.UNAFFECTED
    assert not report.problems
