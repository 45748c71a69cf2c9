"""verl up to 0.7.0 with transformers 5, which has no `AutoModelForVision2Seq`: an advice."""

from __future__ import annotations

from rlhf_patches import Advice, CoInstalled, Guard, Shape, Signature, Variant

_WITHOUT = CoInstalled("transformers", ">=5.0.0rc3,<=5.24.0")
_BUILDS = "verl.workers.fsdp_workers:ActorRolloutRefWorker._build_model_optimizer"

ADVICE = Advice(
    name="verl-vision2seq",
    summary="verl up to 0.7.0 cannot build a model with transformers 5",
    harm="crash",
    bug="verl up to 0.7.0 cannot build a model with transformers 5",
    when="verl 0.3.0.post0 to 0.7.0 with transformers 5 and later, which pip and uv install with it",
    symptom="""\
`ImportError: cannot import name 'AutoModelForVision2Seq' from 'transformers'`: from 0.6.0 on when `verl.utils.model` is
imported, which every trainer does; before 0.6.0 when an FSDP worker builds its model, including text models.""",
    cause="""\
These releases import the class, which transformers 5.0.0 removed; `AutoModelForImageTextToText` has replaced it. From
0.6.0 on the import is at the top of a module, so there is no function to repair. The older releases need more changes
than this name: none of their functions has been trained with transformers 5.""",
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
