"""ZeRO-2 with two backward calls at the boundary before one step, which the release refuses: ``--out FOLDER``.

Before apply() of deepspeed-zero2-accumulation, after it, and after revert().
"""

from __future__ import annotations

import torch

from rlhf_patches.patches.deepspeed.proofs import on_cpu
from rlhf_patches.proving import states

NAME = "deepspeed-zero2-accumulation"


def raised() -> str:
    """The error of the second of two backward calls, each of which says that it is the last one of its step."""
    torch.manual_seed(0)
    engine = on_cpu.engine(torch.nn.Linear(4, 2), {"stage": 2}, gradient_accumulation_steps=1)
    try:
        for x in torch.randn(2, 3, 4):
            engine.backward(engine(x).pow(2).sum())
    except TypeError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


def main() -> None:
    options = states.parser().parse_args()
    on_cpu.start()
    states.report(NAME, raised, options.out)


if __name__ == "__main__":
    main()
