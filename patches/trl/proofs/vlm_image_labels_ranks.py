"""A step of SFT on images, and the mean over its text in float64: ``--out FOLDER CASE...``.

Each case before apply() of trl-vlm-image-labels and after it, the first one after revert() too.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
import transformers
from datasets import Dataset

from rlhf_patches.patches.transformers.proofs.kept_gradient import Kept
from rlhf_patches.patches.trl.proofs import small
from rlhf_patches.proving import states

NAME = "trl-vlm-image-labels"
SIZE, PATCH = 28, 14
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}"
    "{% endif %}<e>{% endfor %}"
)
KINDS: dict[str, type] = {}
"""The collator of a case, if it is another one."""


def processor() -> Any:
    """LLaVA's, of bytes: an image is four placeholders, and one for the class."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<e>", pad_token="<p>")
    words.add_special_tokens({"additional_special_tokens": ["<s>", "<image>"]})
    pictures = getattr(transformers, "CLIPImageProcessorPil", transformers.CLIPImageProcessor)
    return transformers.LlavaProcessor(
        image_processor=pictures(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE}),
        tokenizer=words,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE,
        image_token="<image>",
        num_additional_image_tokens=1,
    )


def model(words: Any) -> Any:
    torch.manual_seed(0)
    tiny = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    image = words.tokenizer.convert_tokens_to_ids("<image>")
    text = transformers.LlamaConfig(
        vocab_size=len(words.tokenizer), num_key_value_heads=2, max_position_embeddings=256, **tiny
    )
    config = transformers.LlavaConfig(
        text_config=text,
        vision_config=transformers.CLIPVisionConfig(image_size=SIZE, patch_size=PATCH, **tiny),
        image_token_index=image,
        image_token_id=image,
        vision_feature_layer=-1,
    )
    return transformers.LlavaForConditionalGeneration(config).float()


def data(case: str) -> Dataset:
    from PIL import Image

    rows = []
    for color, word in ((40, "dark"), (200, "a bright one")):
        images = [] if case == "without an image" else [Image.new("RGB", (SIZE, SIZE), (color, 90, 30))]
        asked = [{"type": "image", "text": None}] * len(images) + [{"type": "text", "text": "What is it?"}]
        question = {"role": "user", "content": asked}
        answer = {"role": "assistant", "content": [{"type": "text", "text": word}]}
        if "completion" in case:
            rows.append({"images": images, "prompt": [question], "completion": [answer]})
        else:
            rows.append({"images": images, "messages": [question, answer]})
    return Dataset.from_list(rows)


def trained(case: str) -> dict[str, Any]:
    """How far a step's gradient and loss are from the mean over all labels but the placeholders."""
    import trl

    words = processor()
    if case == "unknown processor":
        words.image_token_id = None
    policy = model(words)
    exact, optimizer = copy.deepcopy(policy).double(), Kept(policy.parameters(), lr=0.1)
    settings: dict[str, Any] = {"completion_only_loss": False} if case == "prompts, completions" else {}
    collator = KINDS[case](words, max_length=None) if case in KINDS else None
    trainer = trl.SFTTrainer(
        policy,
        trl.SFTConfig(
            states.folder(),
            per_device_train_batch_size=2,
            max_steps=1,
            logging_steps=1,
            max_length=None,
            **small.STEPS,
            **settings,
        ),
        train_dataset=data(case),
        data_collator=collator,
        processing_class=words,
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)),
    )
    seen: list[Any] = []
    prepare = trainer._prepare_inputs

    def recording(inputs: Any) -> Any:
        seen.append({name: value.clone() for name, value in inputs.items() if hasattr(value, "clone")})
        return prepare(inputs)

    trainer._prepare_inputs = recording
    trainer.train()
    (batch,) = seen
    image = words.tokenizer.convert_tokens_to_ids("<image>")
    labels = batch.pop("labels")
    inputs = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    logits = exact(**inputs).logits[:, :-1]
    kept = labels[:, 1:].masked_fill(labels[:, 1:] == image, -100)
    right = torch.nn.functional.cross_entropy(logits.flatten(0, 1), kept.flatten(), ignore_index=-100)
    right.backward()
    wanted = {name: each.grad for name, each in exact.named_parameters() if each.grad is not None}
    got = torch.cat([each.double().flatten() for each in optimizer.found])
    names = [name for name, each in policy.named_parameters() if name in wanted]
    goal = torch.cat([wanted[name].flatten() for name in names])
    logged = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return {
        "gradient": float((got - goal).norm() / goal.norm()) if len(got) == len(goal) else None,
        "factor": float(got.norm() / goal.norm()),
        "loss": [logged, float(right)],
        "labels": int((labels != -100).sum()),
        "placeholders": int((labels == image).sum()),
        "found": [float(value).hex() for value in got[:: max(1, len(got) // 60)]],
    }


def main() -> None:
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    parser = states.parser()
    parser.add_argument("cases", nargs="+")
    options = parser.parse_args()
    states.report_cases(NAME, lambda cases: {case: trained(case) for case in cases}, options.cases, options.out)
