"""TRL to 0.26 with vLLM from 0.12 on, which has no `GuidedDecodingParams`: an advice."""

from __future__ import annotations

from rlhf_patches import Advice, CoInstalled, Guard, Shape, Signature, Variant

_WITHOUT = CoInstalled("vllm", ">=0.12.0,<=0.33.0")
_IMPORTED = "from vllm.sampling_params import GuidedDecodingParams"
_SERVE, _GRPO = "trl.scripts.vllm_serve:<module>", "trl.trainer.grpo_trainer:<module>"
_OTHERS = ("trl.trainer.rloo_trainer:<module>", "trl.trainer.online_dpo_trainer:<module>")

ADVICE = Advice(
    name="trl-guided-decoding",
    summary="GRPO and RLOO of TRL to 0.26 cannot be imported with vLLM from 0.12 on",
    harm="crash",
    bug="GRPO and RLOO of TRL to 0.26 cannot be imported with vLLM from 0.12 on",
    when="trl 0.16.0 to 0.26.2 with vllm from 0.12 on, used or not",
    symptom="""\
`from trl import GRPOTrainer` (RLOO, OnlineDPO and others too; in 0.16 and 0.17 only `trl vllm-serve`) raises
`ImportError: cannot import name 'GuidedDecodingParams' from 'vllm.sampling_params'`. It is enough that vLLM is
installed.""",
    cause="""\
These modules import the class at their top if vLLM is installed. vLLM 0.12.0 no longer has it;
`StructuredOutputsParams` replaces it, with other names.""",
    what_to_do="Pin `vllm<0.12`, or use trl 0.27.0 or later.",
    signatures=(
        Signature(
            "ImportError",
            "cannot import name 'GuidedDecodingParams' from 'vllm.sampling_params'",
            (_SERVE, _GRPO, *_OTHERS),
        ),
    ),
    references=(
        "https://github.com/huggingface/trl/issues/4617",
        "https://github.com/vllm-project/vllm/pull/29326",
    ),
    variants=(
        Variant(Guard("trl", ">=0.16.0,<=0.17.0", co_installed=_WITHOUT), (Shape(_SERVE, _IMPORTED),)),
        Variant(
            Guard("trl", ">=0.18.0,<=0.26.2", co_installed=_WITHOUT),
            (Shape(_SERVE, _IMPORTED), Shape(_GRPO, _IMPORTED)),
        ),
    ),
    obsolete_when="when the oldest TRL in use is 0.27.0",
)
