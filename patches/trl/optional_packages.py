"""TRL's optional packages with transformers 5.3 and later: a missing package does not count as installed."""

from __future__ import annotations

from rlhf_patches import CoInstalled, Guard, Patch, Rewrite, Signature, Variant

_TUPLES = CoInstalled("transformers", ">=5.3.0,<=5.24.0")
_SINCE_0_16 = "fastapi pydantic requests uvicorn"
_OLD = "deepspeed diffusers llm_blender mergekit unsloth vllm"
_NEW = "deepspeed fastapi joblib llm_blender math_verify mergekit pydantic requests unsloth uvicorn vllm_ascend weave"


def _first(name: str, found: str) -> Rewrite:
    return Rewrite(
        target=f"trl.import_utils:is_{name}_available",
        pattern=f"return {found}",
        # Evaluates the expression only once.
        replacement=f"return found[0] if isinstance(found := {found}, tuple) else found",
    )


def _kept(versions: str, names: str) -> Variant:
    """Releases that check once, when the module is imported, and keep the answer."""
    found = {name: f"_{'is_' * (name == 'jmespath')}{name}_available" for name in names.split()}
    return Variant(
        Guard("trl", versions, co_installed=_TUPLES), tuple(_first(name, flag) for name, flag in found.items())
    )


PATCH = Patch(
    name="trl-optional-packages",
    summary="with transformers 5.3 and later, TRL does not report a missing package as installed",
    harm="crash",
    bug="vllm, mergekit, weave and others count as installed, so GRPO and DPO cannot be imported without them",
    when="trl before 0.29 with transformers from 5.3 on, which pip and uv choose for it",
    symptom="""\
With transformers 5.3 or later `from trl import GRPOTrainer` (DPO, OnlineDPO, KTO and others too) raises
`ModuleNotFoundError: No module named 'vllm'`, or `'mergekit'`, `'weave'`, `'vllm_ascend'`, `'llm_blender'`: the first
of these that is not installed. If all of them are installed, nothing is wrong.""",
    cause="""\
`trl.import_utils` calls transformers' private `_is_package_available("vllm")` and returns the answer as a boolean.
Since transformers 5.3.0 the answer is a tuple, `(False, None)`, which is true.""",
    repair="""\
Each `is_..._available` of `trl.import_utils` that returns such an answer returns its first item if it is a tuple, and
any other answer as before; TRL 0.29.0 has its own function instead. transformers is left as it is: its own code, and
other code, relies on the tuple. To train GRPO, DPO and the others with transformers 5, `trl-warnings-issued` is needed
too. Not repaired: DPO before 0.23.0 imports `MODEL_FOR_VISION_2_SEQ_MAPPING_NAMES`, which transformers 5 does not
have, and the samplers of GRPO before 0.17.0, KTO and BCO before 0.18.0 accept no data set, which transformers passes
to them since 4.52: pin transformers below that version.""",
    signatures=tuple(
        Signature(
            "ModuleNotFoundError", f"No module named '{name}'", frames=("trl.import_utils:_LazyModule._get_module",)
        )
        for name in ("vllm", "mergekit", "weave", "vllm_ascend", "llm_blender")
    ),
    references=(
        "https://github.com/modelscope/ms-swift/pull/9770",
        "https://github.com/modelscope/ms-swift/pull/8280",
        "https://github.com/unslothai/unsloth/pull/5129",
    ),
    variants=(
        _kept(">=0.14.0,<0.16.0", f"{_OLD} rich"),
        _kept(">=0.16.0,<0.17.0", f"{_OLD} rich {_SINCE_0_16}"),
        _kept(">=0.17.0,<0.18.0", f"{_OLD} rich {_SINCE_0_16} vllm_ascend joblib"),
        _kept(">=0.18.0,<0.24.0", f"{_OLD} {_SINCE_0_16} vllm_ascend joblib"),
        _kept(">=0.24.0,<0.26.0", _NEW),
        _kept(">=0.26.0,<0.27.0", f"{_NEW} jmespath"),
        Variant(
            Guard("trl", ">=0.27.0,<0.29.0", co_installed=_TUPLES),
            tuple(_first(name, f'_is_package_available("{name}")') for name in f"{_NEW} jmespath".split()),
            # 0.29.0 has the same text, and its own function under transformers' name.
            unless_defined=("trl.import_utils:_is_package_available",),
        ),
    ),
    obsolete_when="when the oldest trl in use is 0.29.0",
)
