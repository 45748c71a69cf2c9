"""transformers: ``Trainer`` saves converted weights, and loads them without converting them back."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_TRAINER = "transformers.trainer:Trainer"
_WEIGHTS = f"{__package__}._saved_weights"


_SHARDS = "load_sharded_checkpoint(model, $FOLDER, strict=is_sagemaker_mp_enabled())"


def _changes(shards: str = _SHARDS, alongside: tuple[str, ...] = ()) -> tuple[Rewrite, ...]:
    """For both methods, with a checkpoint of one file, and with one of several.

    Args:
        shards: how resuming loads a checkpoint of several files.
        alongside: statements that no older release has.
    """
    return tuple(
        Rewrite(
            target=f"{_TRAINER}.{method}",
            pattern=pattern,
            replacement=f"$CONVERTED(model, {read}, {pattern})",
            alongside=alongside,
            uses={"CONVERTED": f"{_WEIGHTS}:{function}"},
        )
        for method, several in (("_load_from_checkpoint", shards), ("_load_best_model", _SHARDS))
        for pattern, read, function in (
            ("model.load_state_dict(state_dict, False)", "state_dict", "converted"),
            (several, "$FOLDER", "converted_shards"),
        )
    )


PATCH = Patch(
    name="transformers-resume-weights",
    summary="a mixture of experts resumes from its checkpoint with the trained experts",
    harm="wrong weights",
    bug="resuming and load_best_model_at_end do not restore experts and routers, or a vision-language model",
    when="resume_from_checkpoint or load_best_model_at_end, and Mixtral, Qwen3-MoE, Qwen2.5-VL or similar models",
    excluded_by=("model_family=qwen2|qwen3|llama|mistral",),
    symptom="""\
The bug affects `Trainer.train(resume_from_checkpoint=...)` and `load_best_model_at_end=True`, for a model whose weights
transformers converts when it saves them. For Mixtral, Qwen3-MoE and other mixtures of experts (transformers 5),
attention comes from the checkpoint, but experts and routers are those of the model that the trainer was given, and the
optimizer's moments belong to other weights. The loss jumps back. The best model at the end has the experts of the last
step. For Qwen2.5-VL and other vision-language models (since 4.52.0) nearly every weight is affected. No error; the log
contains "There were missing keys in the checkpoint model loaded".""",
    cause="""\
`save_pretrained` writes the Hub's names and shapes: separate experts, which are one tensor in the model.
`from_pretrained` converts them back. `_load_from_checkpoint` and `_load_best_model` do not: they pass the file's
contents to `model.load_state_dict(state_dict, False)`, which ignores every name that it does not know.""",
    repair="""\
If a checkpoint's names are not the model's, the patch converts its weights by transformers' own operations, those that
saving reverts, and loads them as well. Resumed steps are then those of an uninterrupted run, bit for bit, with one
file or several. The patch loads converted weights only if saving them gives the checkpoint again, bit for bit, and
every weight of the model is present with its shape, or is tied to one that is. Otherwise it logs one warning and
nothing changes.

For models whose weights are saved without conversion the patch compares the names once, and nothing changes. The same
holds for models that do not inherit from `PreTrainedModel` (a PEFT model, a compiled one), for weights split over ranks
as DTensors, and for pickled shards. Under FSDP and DeepSpeed the trainer loads what these have saved, unconverted: the
bug does not occur.

A class of yours that inherits from a transformers model counts as one. Its converted weights are loaded too, by its own
`load_state_dict` if it has one. If its experts are meant to keep the values that the trainer was given, disable the
patch (`RLHF_PATCHES_DISABLE=transformers-resume-weights`).

The checkpoints are complete and need no repair. If you have resumed a run without the patch, resume it again.""",
    references=(
        "https://github.com/huggingface/transformers/issues/48805",
        "https://github.com/huggingface/transformers/issues/43701",
        "https://github.com/huggingface/transformers/pull/48822",
    ),
    variants=(
        Variant(
            Guard("transformers", ">=4.52.0,<=4.57.6"),
            _changes(
                f"{_SHARDS[:-1]}, prefer_safe=self.args.save_safetensors)", alongside=("check_torch_load_is_safe()",)
            ),
        ),
        Variant(Guard("transformers", ">=5.0.0rc1,<=5.24.0"), _changes()),
    ),
    obsolete_when="when the oldest transformers in use converts what its Trainer loads; no release so far does",
    changes_numbers="""\
Since 5.0.0, resuming a mixture of experts, or loading its best checkpoint at the end, has not loaded the experts and
routers: they kept their initial values, or those of the last step. Since 4.52.0 the same has happened to most weights
of a vision-language model. With the patch these weights come from the checkpoint. Resume from the checkpoint before the
first such interruption; if a wrong best model was saved at the end, the right one is in the folder of its
checkpoint.""",
    conditions=(Condition(f"{_TRAINER}._load_from_checkpoint"), Condition(f"{_TRAINER}._load_best_model")),
)
