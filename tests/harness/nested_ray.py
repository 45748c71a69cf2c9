"""A driver whose actor starts Ray once more, as vLLM's Ray executor does: ``[--hook]``. Prints what became of it.

A process of its own joins the cluster with the actor's runtime environment.
"""

import importlib
import json
import subprocess
import sys
from typing import Any

import ray

import rlhf_patches.ray

AGAIN = "import json, ray, sys; ray.init(address=sys.argv[1], runtime_env=json.loads(sys.argv[2])); print('went on')"


class Engine:
    def start(self) -> tuple[str, str]:
        context = ray.get_runtime_context()
        arguments = (context.gcs_address, json.dumps(dict(context.runtime_env)))
        done = subprocess.run([sys.executable, "-c", AGAIN, *arguments], capture_output=True, text=True, timeout=100)
        import rlhf_patches.site_hook

        patched = any(type(finder).__module__ == rlhf_patches.site_hook.__name__ for finder in sys.meta_path)
        return "patched" if patched else "unpatched", (done.stdout or done.stderr).strip().splitlines()[-1]


made = rlhf_patches.ray.runtime_env()
if "--hook" in sys.argv:
    made["worker_process_setup_hook"] = "rlhf_patches.site_hook.setup_ray_worker"
own_ray: Any = importlib.import_module("own_ray")  # beside this file; the repository is not on the path
own_ray.start(num_cpus=1, runtime_env=made)
actor: Any = ray.remote(Engine).remote()
print(*ray.get(actor.start.remote()), sep="\n")
