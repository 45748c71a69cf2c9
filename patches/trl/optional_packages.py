"""Packages that are optional to TRL beside transformers 5.3 and later: what is not installed does not count as it."""

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
        # Of what it was called with nothing is asked twice.
        replacement=f"return found[0] if isinstance(found := {found}, tuple) else found",
    )


def _kept(versions: str, names: str) -> Variant:
    """Releases that ask once, when the module is imported, and keep what they were told."""
    found = {name: f"_{'is_' * (name == 'jmespath')}{name}_available" for name in names.split()}
    return Variant(
        Guard("trl", versions, co_installed=_TUPLES), tuple(_first(name, flag) for name, flag in found.items())
    )


PATCH = Patch(
    name="trl-optional-packages",
    summary="beside transformers 5.3 and later, TRL takes no package for installed that is not",
    harm="crash",
    bug="vllm, mergekit, weave and others count as installed, so that GRPO and DPO cannot be imported without them",
    when="trl before 0.29 beside transformers from 5.3 on, which pip and uv choose for it",
    symptom="""\
Beside transformers 5.3 or later `from trl import GRPOTrainer` (DPO, OnlineDPO, KTO and others too) ends in
`ModuleNotFoundError: No module named 'vllm'`, or `'mergekit'`, `'weave'`, `'vllm_ascend'`, `'llm_blender'`: whichever
of these is not installed and comes first. Where all of them are, nothing is wrong.""",
    cause="""\
`trl.import_utils` asks transformers' private `_is_package_available("vllm")` and passes the answer on as a boolean.
Since transformers 5.3.0 the answer is a tuple, `(False, None)`, which is true.""",
    repair="""\
Each `is_..._available` of `trl.import_utils` that passes on such an answer gives its first item where it is a tuple,
and what it is where it is not; TRL 0.29.0 has a function of its own instead. transformers is left as it is: its own
code, and others', relies on the tuple. That GRPO, DPO and the others train then beside transformers 5 takes
`trl-warnings-issued` too. Not repaired: DPO before 0.23.0 imports `MODEL_FOR_VISION_2_SEQ_MAPPING_NAMES`, which
transformers 5 does not have, and the samplers of GRPO before 0.17.0, KTO and BCO before 0.18.0 take no data set, which
transformers gives them since 4.52: pin it below.""",
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
            # 0.29.0 has the same text, and a function of its own under transformers' name.
            unless_defined=("trl.import_utils:_is_package_available",),
        ),
    ),
    obsolete_when="when the oldest trl in use is 0.29.0",
)
