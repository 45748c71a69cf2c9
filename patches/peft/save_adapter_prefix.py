"""PEFT: saving an adapter also saves others whose parameters' names contain its name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from rlhf_patches import Guard, Patch, Variant, Wrap


def without_the_others(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    """Around ``get_peft_model_state_dict``: for LoRA, removes the keys of other adapters beforehand."""
    model, state_dict, adapter, *more = args
    unwrapped = getattr(model, "_orig_mod", model) if more and more[0] else model  # unwrap_compiled
    others = [re.escape(name) for name in unwrapped.peft_config if name != adapter]
    if others and unwrapped.peft_config[adapter].peft_type in ("LORA", "ADALORA"):
        # An adapter's name follows the container of its parameters: a module of the base model may have the same name.
        of_another = re.compile(rf"\.(lora_\w+|modules_to_save)\.({'|'.join(others)})(\.|$)")
        whole = unwrapped.state_dict() if state_dict is None else state_dict
        state_dict = {key: whole[key] for key in whole if not of_another.search(key)}
    return wrapped(model, state_dict, adapter, *more, **kwargs)


PATCH = Patch(
    name="peft-save-adapter-prefix",
    summary="a saved LoRA adapter contains no parameters of other adapters",
    harm="wrong weights",
    bug="an adapter is saved with the parameters of others whose names contain its name",
    when="two adapters such as policy and policy_ref, or one whose name is part of a module's name",
    excluded_by=("use_peft=false|absent",),
    symptom="""\
A model with two adapters, `policy` and `policy_ref`: the saved `policy` has the parameters of both. The file is twice
as large, and has keys (`lora_A.policy_ref.weight`; before 0.18 `lora_A_ref.weight`) that PEFT drops with a warning on
loading and that other software, such as vLLM, may reject. An adapter whose name is part of a module's name (`up`,
`proj`), or of `lora_A` itself, is saved with all other adapters.""",
    cause="""\
`get_peft_model_state_dict` takes every LoRA key that contains the adapter's name anywhere: `adapter_name in key`.""",
    repair="""\
The patch removes the keys of the other adapters, by their exact names, from the state dict beforehand, as 0.20.0 does.
The patch covers LoRA and AdaLoRA only: other methods save every adapter, and are left as released. PEFT before 0.7 has
the bug too.""",
    references=("https://github.com/huggingface/peft/pull/3282",),
    variants=(
        Variant(
            Guard("peft", ">=0.7.0,<0.20.0"),
            (
                Wrap(
                    target="peft.utils.save_and_load:get_peft_model_state_dict",
                    implementation=f"{__name__}:without_the_others",
                    fingerprints={
                        "6ed0caddb0f7e160": "0.7.0 to 0.7.1",
                        "71348fcd6fa77f61": "0.8.0",
                        "205bb11a63d1eab2": "0.8.1 to 0.8.2",
                        "d1cdd0f51d1199fc": "0.9.0 to 0.10.0",
                        "c03cb489dc83f137": "0.11.0 to 0.11.1",
                        "7eded932da35c287": "0.12.0",
                        "faa58c72a26cbc62": "0.13.0 to 0.13.2",
                        "7dee96a326ecbc9a": "0.14.0",
                        "59d869d58450209f": "0.15.0",
                        "ee639a6d012d74e4": "0.15.1 to 0.16.0",
                        "11aaba4108c483ec": "0.17.0 to 0.17.1",
                        "8c89d861391f6c36": "0.18.0rc0 to 0.18.1",
                        "f23271fb0570358a": "0.19.0 to 0.19.1",
                    },
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest PEFT in use is 0.20.0",
)
