"""One step of prompt tuning, whose virtual tokens predict the first label: ``--out FOLDER [CASE ...]``.

Each case before apply() of transformers-prompt-tuning-count, after it, and after revert(): the gradient, and that of
the mean over the predicted tokens, in float64 and from the logits.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable
from typing import Any

import peft
import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments

from rlhf_patches.patches.transformers.proofs.eval_loss_ranks import Collator
from rlhf_patches.patches.transformers.proofs.first_token_count_ranks import ROWS, VOCABULARY, Keep, data
from rlhf_patches.patches.transformers.proofs.kept_gradient import multiple
from rlhf_patches.proving import states

NAME = "transformers-prompt-tuning-count"
VIRTUAL = 3
Make = Callable[[], Any]


def llama() -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            pad_token_id=0,
        )
    )


def tuned(kind: str = "PromptTuning", make: Make = llama, of: Any = None) -> Any:
    """A model with an adapter of PEFT's; of another class if it is given."""
    config = getattr(peft, f"{kind}Config")(
        task_type="CAUSAL_LM", **({"r": 2} if kind == "Lora" else {"num_virtual_tokens": VIRTUAL})
    )
    return peft.get_peft_model(make(), config) if of is None else of(make(), config)


def by_definition(model: Any, rows: list[Any]) -> dict[str, torch.Tensor]:
    """Of all labels behind virtual tokens, otherwise of those behind the first token."""
    exact = copy.deepcopy(model).double()
    batch = Collator()(rows)
    labels = batch.pop("labels")
    logits = exact(**batch).logits
    added = logits.shape[1] - labels.shape[1]
    logits, labels = (logits[:, added - 1 : -1], labels) if added else (logits[:, :-1], labels[:, 1:])
    cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    return {name: each.grad for name, each in exact.named_parameters() if each.grad is not None}


def step(
    make: Make,
    *,
    kind: str = "tokens",
    of: type[Trainer] = Trainer,
    change: Callable[[Any], Any] = lambda trainer: None,
    own_loss: Any = None,
    **more: Any,
) -> dict[str, Any]:
    """The loss of a step, the factor on the gradient by definition, and the distance from that multiple."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        torch.manual_seed(0)
        model = make()
        rows = data(kind)
        wanted = by_definition(model, rows)
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=not torch.cuda.is_available(),
            **{"per_device_train_batch_size": ROWS, **more},
            max_steps=1,
            max_grad_norm=0.0,
            save_strategy="no",
            remove_unused_columns=False,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = of(
            model=model,
            args=arguments,
            train_dataset=rows,
            eval_dataset=rows,
            compute_loss_func=own_loss,
            data_collator=Collator(),
        )
        change(trainer)
        trainer.add_callback(keep := Keep())
        loss = trainer.train().training_loss
        return {"loss": loss, **compared(keep.found, wanted)}


def compared(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, Any]:
    one = torch.cat([found[name].double().flatten() for name in wanted])
    return {**multiple(found, wanted), "gradient": [float(value).hex() for value in one[::7]]}


CASES: dict[str, Callable[[], dict[str, Any]]] = {"prompt tuning": lambda: step(tuned)}


def main(cases: dict[str, Callable[[], dict[str, Any]]] = CASES) -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="*", metavar="CASE", default=list(cases))
    options = parser.parse_args()
    states.report_cases(NAME, lambda names: {name: cases[name]() for name in names}, options.cases, options.out)
