"""verl to 0.7.0 beside transformers 5, which has no `AutoModelForVision2Seq`: an advice."""

from __future__ import annotations

from rlhf_patches import Advice, CoInstalled, Guard, Shape, Signature, Variant

_WITHOUT = CoInstalled("transformers", ">=5.0.0rc3,<=5.24.0")
_BUILDS = "verl.workers.fsdp_workers:ActorRolloutRefWorker._build_model_optimizer"

ADVICE = Advice(
    name="verl-vision2seq",
    summary="verl to 0.7.0 builds no model beside transformers 5",
    harm="crash",
    bug="verl to 0.7.0 builds no model beside transformers 5",
    when="verl 0.3.0.post0 to 0.7.0 beside transformers from 5 on, which pip and uv choose for it",
    symptom="""\
`ImportError: cannot import name 'AutoModelForVision2Seq' from 'transformers'`: from 0.6.0 on when `verl.utils.model` is
imported, which every trainer does, and before that when an FSDP worker builds its model, one for text too.""",
    cause="""\
They import the class, which transformers 5.0.0 no longer has; `AutoModelForImageTextToText` has taken its place. It
stands at the top of a module from 0.6.0 on, so no function could be repaired, and the older releases need more than
this name: no function of theirs has been trained beside transformers 5.""",
    what_to_do="Use verl 0.7.1 or later, or pin `transformers<5`.",
    signatures=(
        Signature(
            "ImportError",
            "cannot import name 'AutoModelForVision2Seq' from 'transformers'",
            (
                "verl.utils.model:<module>",
                "verl.model_merger.base_model_merger:<module>",
                "verl.utils.model:load_valuehead_model",
                _BUILDS,
            ),
        ),
    ),
    references=(
        "https://github.com/verl-project/verl/issues/5007",
        "https://github.com/verl-project/verl/pull/5445",
    ),
    variants=(
        Variant(
            Guard("verl", ">=0.3.0.post0,<=0.5.0", co_installed=_WITHOUT),
            (
                Shape(
                    _BUILDS,
                    "type(actor_model_config) in AutoModelForVision2Seq._model_mapping.keys()",
                    unless=("AutoModelForImageTextToText",),
                ),
            ),
        ),
        Variant(
            Guard("verl", ">=0.6.0,<=0.7.0", co_installed=_WITHOUT),
            (Shape("verl.utils.model:<module>", "from transformers import AutoModelForVision2Seq"),),
        ),
    ),
    obsolete_when="when the oldest verl in use is 0.7.1",
)
