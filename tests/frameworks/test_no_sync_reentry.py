"""The five ``*-no-sync-reentry`` patches, in real training that is entered once per rollout.

ms-swift, Megatron-Bridge and verl are the installed packages, and their own functions put the hooks on the
config. Megatron-LM and slime are not on PyPI: tests/support/standins has functions of our own with the same
statements. megatron-core underneath is real in every case.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from training_checks import assert_failure, assert_same_training

from rlhf_patches import Status, inspection, plugins, sources

MESSAGE = "When overlap_grad_reduce is True, config.no_sync_func must be None"
ENTRIES = {
    "swift": "framework_entries:install_swift",
    "megatron-bridge": "framework_entries:install_megatron_bridge",
    "verl": "framework_entries:install_verl",
    "slime": "slime",
    "megatron-lm": "megatron-lm",
    "megatron-lm-newer": "megatron-lm-newer",
}
SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(params=ENTRIES)
def entry(request):
    return ("--entry", ENTRIES[request.param])


@pytest.fixture(scope="module")
def reference(train):
    return train("--scenario", "reference")


def test_rollouts_crash_without_the_patch_and_train_on_with_it(train, reference, entry):
    """With both overlap flags and saves; the assertion comes first, and the pre-hooks would come next."""
    unpatched = train(*entry, "--no-overlap-param-gather")
    assert_failure(unpatched, "AssertionError", MESSAGE, rollout=2)
    assert_same_training(train(*entry, "--save", "--apply"), reference)


def test_a_custom_no_sync_func_is_still_rejected(train, entry):
    assert_failure(train("--scenario", "custom-no-sync", *entry, "--apply"), "AssertionError", MESSAGE, rollout=1)


@pytest.mark.parametrize("name", ["swift", "verl", "slime"])
def test_actor_and_critic_on_one_config_reduce_their_own_gradients(train, name):
    """Each entry installs its own model's functions, so the reduced gradients are those of a float64 reference.

    Tolerance 1e-4 of the largest gradient: float32 rounding showed as up to 1e-5 here, wrong gradients as 1e-2 to 0.8.
    """
    reports = train("--scenario", "shared-config", "--entry", ENTRIES[name], "--rollouts", "2", "--apply")
    for report in reports:
        assert report["failure"] is None, report["failure"]
        assert {gradient["role"] for gradient in report["gradients"]} == {"actor", "critic"}
        assert len(report["gradients"]) == 12
        assert max(gradient["max_relative"] for gradient in report["gradients"]) < 1e-4


def test_skipping_the_installation_would_corrupt_gradients(train):
    """What the upstream pull requests do ("install only when None"): the reason why our assertion lets it run.

    It also shows that the comparison in the test above can fail.
    """
    reports = train("--scenario", "shared-config", "--entry", "none-twice", "--rollouts", "2", "--apply")
    errors = [g["max_relative"] for report in reports for g in report["gradients"] if g["role"] == "critic"]
    assert all(report["failure"] is None for report in reports), "silently: nothing raises"
    assert max(errors) > 0.1


def test_disabled_it_stays_away(train):
    settings = {"RLHF_PATCHES_DISABLE": "*-no-sync-reentry"}
    arguments = ("--entry", ENTRIES["verl"], "--no-overlap-param-gather", "--apply")
    assert_failure(train(*arguments, **settings), "AssertionError", MESSAGE, rollout=2)


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
    patch = next(item.patch for item in plugins.load()[0] if item.patch.name == f"{name}-no-sync-reentry")
    (module,) = patch.modules
    installed = Path(str(sources.locate(module).origin))
    folder = tmp_path
    for part in module.split(".")[:-1]:
        folder = folder / part
        folder.mkdir()
        if part != "megatron":
            (folder / "__init__.py").touch()
    text = installed.read_text()
    assertion = r"assert (\w+)\.no_sync_func is None, \(([^)]*)\)\n"
    assert len(re.findall(assertion, text)) == 1
    if fixed:
        text = re.sub(assertion, r"if \1.no_sync_func is None: pass\n", text)
    (folder / f"{module.rpartition('.')[2]}.py").write_text(text)
    distribution = patch.guard.distribution
    version = version or importlib.metadata.version(distribution)
    metadata = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "rlhf_patches.cli", "doctor", "--json"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    row = next(row for row in json.loads(done.stdout) if row["name"] == patch.name)
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
