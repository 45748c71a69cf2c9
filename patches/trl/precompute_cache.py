"""DPO and KTO with precompute_ref_log_probs: a run takes only what was computed with its own settings."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_METHOD = "_precompute_ref_logps"
_DPO = f"trl.trainer.dpo_trainer:DPOTrainer.{_METHOD}"
_EXPERIMENTAL_KTO = f"trl.experimental.kto.kto_trainer:KTOTrainer.{_METHOD}"
_KTO = f"trl.trainer.kto_trainer:KTOTrainer.{_METHOD}"


def _keyed(target: str, *more: str) -> Rewrite:
    key = f"Hasher.hash(({', '.join(('dataset._fingerprint', 'model_hash', *more))}))"
    return _assigned(target, key, f"$KEYED(self, dataset, {key})", "keyed")


def _assigned(target: str, key: str, replacement: str, function: str) -> Rewrite:
    return Rewrite(
        target,
        f"fingerprint = {key}",
        f"fingerprint = {replacement}",
        alongside=("dataset._get_cache_file_path(fingerprint)",),
        unless=("self.ld_alpha", "self.args.max_length"),
        uses={"KEYED": f"{__package__}._reference_cache:{function}"},
    )


_KEY = "Hasher.hash((dataset._fingerprint, model_hash))"
PATCH = Patch(
    name="trl-precompute-cache",
    summary="DPO and KTO with precompute_ref_log_probs use a reference of their own settings",
    harm="wrong gradient",
    bug="a run takes the reference's log-probabilities of an earlier run with another max_length or ld_alpha",
    when="DPOTrainer or KTOTrainer with precompute_ref_log_probs, the same data and weights, and another setting",
    excluded_by=("precompute_ref_log_probs=false|absent", "trl=sft|grpo|reward|rloo|gold"),
    symptom="""\
A second run of DPO with `precompute_ref_log_probs=True`, the same data set on disk and the same weights, but another
`max_length` or `truncation_mode`, computes no log-probabilities: it takes those of the first run. Since 1.8.0 the same
happens with another `ld_alpha`; in KTO with another `max_length`, from 1.4.0 to 1.8.x. Loss, rewards and gradients are
then those of a reference of other sequences. No error. Since 1.9.0, KTO is right, and so is DPO with
`truncation_mode="keep_start"` and a `max_length`, as by default: their data set's key depends on all arguments, unless
`_prepare_dataset` is your own.""",
    cause="""\
The log-probabilities are stored beside the data set, under a key of its fingerprint and of the model's weights. The
settings by which the sequences are truncated, and `ld_alpha`, are not part of the key.""",
    repair="""\
The key has these settings too. The first run with the patch computes the log-probabilities again, since nobody knows
the settings of a file that a release has written; later runs with the same settings take them from the new file. Old
files stay on disk.

A data set in memory has no such file, and with DPO's defaults since 1.9.0 and TRL's own `_prepare_dataset` the
release's key is right: there nothing changes. The patch does not change a trainer with your own data collator,
`compute_ref_log_probs` or `_precompute_ref_logps`, and logs its name in one line on rank 0. Not repaired: KTO since
1.9.0 with a `_prepare_dataset` of your own; settings of the model that are no weights, such as those of its rotary
embedding; and the precision of the run (`bf16`, `fp16`). In these cases delete the files `cache-*` of the data
set.""",
    changes_numbers="""\
Since TRL 0.29.0, DPO with precomputed log-probabilities was trained against the wrong reference if an earlier run had
another `max_length` or `truncation_mode`, or, since 1.8.0, another `ld_alpha`; KTO from 1.4.0 to 1.8.x with another
`max_length`. Restart such a run. A run in an empty cache is not affected.""",
    references=("https://github.com/huggingface/trl/blob/v1.16.0/trl/trainer/dpo_trainer.py",),
    variants=(
        Variant(Guard("trl", ">=0.29.0,<1.4.0"), (_keyed(_DPO),)),
        Variant(
            Guard("trl", ">=1.4.0,<1.8.0"),
            (_keyed(_DPO), _keyed(_EXPERIMENTAL_KTO, "self.calculate_KL")),
            independent=True,
        ),
        Variant(Guard("trl", ">=1.8.0,<1.9.0"), (_keyed(_DPO), _keyed(_KTO, "self.calculate_KL")), independent=True),
        Variant(
            Guard("trl", ">=1.9.0,<=1.16.0"),
            (_assigned(_DPO, f"[{_KEY}]", f"[$KEYED(self, dataset, {_KEY})]", "keyed_without_arguments"),),
        ),
    ),
    obsolete_when="when the oldest trl in use has these settings in its key; no release so far does",
    conditions=tuple(map(Condition, (_DPO, _EXPERIMENTAL_KTO, _KTO))),
)
