"""A script as a user of megatron-core has it, of one of the cases: ``torchrun ... rehearsal_script.py CASE``."""

from __future__ import annotations

import sys

import torch

from tests.patches.megatron_core.rehearsal_ranks import CASES, Training, get_forward_backward_func, megatron_gpt

if __name__ == "__main__":
    torch.compiler.set_stance("force_eager")
    torch.distributed.init_process_group("gloo")
    megatron_gpt.let_experts_run()
    training = Training(CASES[sys.argv[1]])
    for _ in range(3):
        print("norm", training.step(get_forward_backward_func())[1])
