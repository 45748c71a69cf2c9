"""SFT of vision-language models: placeholders of images are no labels."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_COLLATOR = "trl.trainer.sft_trainer:DataCollatorForVisionLanguageModeling"
_LANGUAGE, _PROMPTS = f"{_COLLATOR}._collate_language_modeling", f"{_COLLATOR}._collate_prompt_completion"
_OURS = f"{__package__}._placeholder_labels"


def _ignored(target: str, padding: str, function: str) -> Rewrite:
    return Rewrite(
        target,
        padding,
        f"{padding}; labels = $WITHOUT(self, labels)",
        uses={"WITHOUT": f"{_OURS}:{function}"},
    )


PATCH = Patch(
    name="trl-vlm-image-labels",
    summary="SFT of vision-language models does not train placeholders of images as text",
    harm="wrong gradient",
    bug="placeholders of images are labels: the model is trained to predict them, and they are part of the mean loss",
    when="SFTTrainer with a vision-language model and conversations or text, without completion_only_loss",
    excluded_by=("trl=dpo|grpo|kto|reward|rloo",),
    symptom="""\
`SFTTrainer` trains a vision-language model on conversations with images. A processor writes hundreds of placeholders
for an image, which are all labels. They soon have a loss near 0, so the logged loss is too small, and in the gradient
the text has the share of its tokens: with 64 placeholders among 110 labels less than half. Batches with large images
weigh less. No error. Data with a prompt and a completion is not affected by default.""",
    cause="""\
`DataCollatorForVisionLanguageModeling` makes a label -100 only where there is padding. The models of transformers
compute the loss over all other labels.""",
    repair="""\
The patch makes labels -100 where they are tokens that the processor names as its placeholders: `image_token_id`,
`video_token_id` and `audio_token_id`, or the lists `image_token_ids` and so on. The loss is then the mean over the
tokens of text. Special tokens around an image, such as `<|vision_start|>`, stay labels unless a list has them, as in
Pixtral and InternVL. A placeholder that the tokenizer does not know has the token of unknown words, which stays a
label.

Batches without a placeholder, processors without these attributes, processors that are not a class of transformers,
your own collator and subclasses with one of the collator's methods of their own stay as released, bit for bit. So does
data with a prompt and a completion whose loss is that of the completion.""",
    changes_numbers="""\
With the patch the loss is a mean over text, so it is higher from the start, and gradients are larger by the share of
placeholders. Clipping acts more often. Do not compare losses with those of runs without the patch.""",
    references=("https://github.com/huggingface/trl/blob/v1.16.0/trl/trainer/sft_trainer.py",),
    variants=(
        Variant(
            Guard("trl", ">=0.22.0,<=1.16.0"),
            (
                _ignored(_LANGUAGE, 'labels[output["attention_mask"] == 0] = -100', "without"),
                _ignored(_PROMPTS, "labels[attention_mask == 0] = -100", "without_in_prompts"),
            ),
        ),
    ),
    obsolete_when="when the oldest trl in use ignores placeholders; no release so far does",
    contested="TRL's collator says that models handle vision tokens in their loss; those of transformers do not",
    conditions=(Condition(_LANGUAGE), Condition(_PROMPTS)),
)
