"""The runtime environment for Ray, where it takes a process. Real clusters: tests/cluster."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.harness.ray_environment import BARE, HOOK


def test_the_package_does_not_import_it_and_it_does_not_import_ray():
    code = "import rlhf_patches, sys; assert 'rlhf_patches.ray' not in sys.modules; import rlhf_patches.ray; "
    code += "rlhf_patches.ray.runtime_env(); assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ------------------------------------------------------------------------------------------ the command


def test_the_command_prints_one_line_of_json(installed):
    done = installed.run(installed.command, "ray-env", RLHF_PATCHES_DISABLE="trl-*")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["env_vars"] == {**BARE, "RLHF_PATCHES_DISABLE": "trl-*"}
    text = '{"env_vars": {"A": "1"}, "working_dir": "."}'
    done = subprocess.run(
        [installed.command, "ray-env", "-"], input=text, env=installed.environment({}), capture_output=True, text=True
    )
    assert json.loads(done.stdout) == {
        "env_vars": {"A": "1", **BARE},
        "working_dir": ".",
        "worker_process_setup_hook": HOOK,
    }
