"""ms-swift's reference pass without Megatron, of a policy with LoRA and dropout: ``--out FOLDER``, on one rank.

Before apply() of swift-null-ref-context-hf, after it, and after revert(): two passes in `null_ref_context`, and the
same in float64, from the weights without the adapter. The trainer's class, PEFT and ms-swift's set-up of adapters are
real; the trainer is made without its `__init__`, which would load a model from disk.
"""

from __future__ import annotations

from typing import Any

import torch

from rlhf_patches.patches.swift.proofs.small import DROPOUT, VOCABULARY, Transformers
from rlhf_patches.proving import states

NAME = "swift-null-ref-context-hf"
ROWS, LENGTH = 2, 17


def family() -> Transformers:
    """The trainer's class, and the models that go with it."""
    try:
        return Transformers("swift.rlhf_trainers.grpo_trainer:GRPOTrainer")
    except ModuleNotFoundError:  # before 4.0
        return Transformers("swift.trainers.rlhf_trainer.grpo_trainer:GRPOTrainer")


def adapted(made: Transformers) -> Any:
    """A model with an adapter that does something, in training mode."""
    from swift.tuners import LoraConfig, Swift

    settings = {"r": 4, "lora_alpha": 8, "lora_dropout": DROPOUT, "target_modules": made.targets}
    model = Swift.prepare_model(made.make_model(), LoraConfig(task_type="CAUSAL_LM", **settings))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.train()


def logps(made: Transformers, model: Any) -> torch.Tensor:
    """Of each token of a batch."""
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(7))
    found = made.logits(model, tokens[:, :-1]).log_softmax(-1)
    return found.gather(-1, tokens[:, 1:, None]).squeeze(-1)


def exactly(made: Transformers, policy: Any) -> torch.Tensor:
    """What the reference has to be: the weights without the adapter, no dropout."""
    plain, state = made.make_model().double().eval(), policy.base_model.model.state_dict()
    names = {name: f"{name.rpartition('.')[0]}.base_layer.{name.rpartition('.')[2]}" for name in plain.state_dict()}
    plain.load_state_dict({name: state.get(name, state.get(below)) for name, below in names.items()})
    return logps(made, plain)


def observe() -> dict[str, float]:
    """How far two passes are apart, and the first one from the reference."""
    torch.manual_seed(1234)
    made = family()
    policy = adapted(made)
    trainer = made.trainer([policy], False)
    passes = []
    with torch.no_grad():
        for _ in range(2):
            with trainer.null_ref_context():
                passes.append(logps(made, policy))
        wanted = exactly(made, policy)
    return {
        "apart": float((passes[0] - passes[1]).abs().max()),
        "error": float((passes[0].double() - wanted).abs().max()),
    }


def main() -> None:
    options = states.parser().parse_args()
    states.report(NAME, observe, options.out)
