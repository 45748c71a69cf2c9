"""A patch applied, reverted and disabled on its loaded framework: ``--out FOLDER PATCH VARIANT``, on one rank."""

from __future__ import annotations

import argparse
import builtins
import json
import sys
from pathlib import Path

from rlhf_patches.definitions import registry
from rlhf_patches.testing import in_process


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("patch")
    parser.add_argument("variant", type=int)
    options = parser.parse_args()
    (patch,) = [item.patch for item in registry.load()[0] if item.patch.name == options.patch]
    variant = patch.variants[options.variant]
    if any(module.startswith("skyrl.") for module in variant.modules) and "megatron" in sys.modules:
        from tests.harness import absent_packages

        absent_packages.install()  # 0.4.0 imports TransformerEngine on the way
    if "trl.experimental.openenv.utils" in variant.modules:  # until 0.29 it needs vLLM's name for an annotation
        vars(builtins).setdefault("SamplingParams", object)
    (options.out / "rank0.json").write_text(json.dumps(in_process.life(patch, variant)))
