"""Advices for TRL beside other packages: what they say is so, by real trainers of real pairs of releases.

The trainers are those of old_trl_ranks.py, each in a process of its own. vLLM, which takes a GPU, is not among them:
what is known of `trl-guided-decoding` was read in both packages' texts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import side_by_side
from tests.harness.logs import diagnosed
from tests.harness.pairs import log_of

_HEAD = f"""\
import sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from datasets import Dataset
from tests.patches.trl import old_trl_ranks as old
import trl

def rows(**columns):
    return Dataset.from_dict({{name: old.sentences(4, length, length) for name, length in columns.items()}})

LENGTHS = dict(max_length=16, max_prompt_length=8, remove_unused_columns=False)
"""
GRPO = f"{_HEAD}\nold.grpo().train()\n"
SFT = f"""{_HEAD}
settings = old.arguments("SFT", max_seq_length=16, dataset_text_field="text")
trl.SFTTrainer(old.model(), args=settings, train_dataset=rows(text=6), tokenizer=old.tokenizer()).train()
"""
REWARD = f"""{_HEAD}
chosen, rejected = (old.tokenizer()(old.sentences(4, 6, seed)) for seed in (3, 4))
columns = {{f"{{key}}_{{kind}}": made[key] for kind, made in (("chosen", chosen), ("rejected", rejected))
           for key in ("input_ids", "attention_mask")}}
settings = old.arguments("Reward", max_length=16, remove_unused_columns=False)
trl.RewardTrainer(old.model(1), settings, train_dataset=Dataset.from_dict(columns), tokenizer=old.tokenizer()).train()
"""
DPO = f"""{_HEAD}
trl.DPOTrainer(old.model(), old.model(), args=old.arguments("DPO", **LENGTHS), NAME=old.tokenizer(),
               train_dataset=rows(prompt=3, chosen=4, rejected=3)).train()
"""
KTO = f"""{_HEAD}
data = rows(prompt=3, completion=4).add_column("label", [True, False, True, False])
trl.KTOTrainer(old.model(), old.model(), args=old.arguments("KTO", **LENGTHS), processing_class=old.tokenizer(),
               train_dataset=data).train()
"""
IMPORT = "from trl import DPOTrainer"
#: Releases of transformers 4, each with its tokenizers; the newest is a folder with what else they need.
TOKENIZERS = {"4.45.2": "0.20.3", "4.46.3": "0.20.3", "4.47.1": "0.21.4", "4.51.3": "0.21.4", "4.57.6": "0.22.2"}


def log_beside(transformers: str, code: str, trl: str) -> str:
    if transformers.startswith("5"):  # the environment's own
        return log_of(code, f"trl=={trl}")
    older = (str(side_by_side.folder("transformers-4.57")),)
    if transformers == "4.57.6":
        return log_of(code, f"trl=={trl}", folders=older)
    names = (f"transformers=={transformers}", f"tokenizers=={TOKENIZERS[transformers]}")
    return log_of(code, f"trl=={trl}", *names, folders=older)


OLD, NEW = (DPO.replace("NAME", name) for name in ("tokenizer", "processing_class"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "code", "trl", "transformers", "error", "pinned"),
    [
        (
            *("trl-dpo-vision-mapping", IMPORT, "0.9.6", "5"),
            "ImportError: cannot import name 'MODEL_FOR_VISION_2_SEQ_MAPPING_NAMES'",
            None,
        ),
        (
            *("trl-dpo-vision-mapping", IMPORT, "0.22.2", "5"),
            "ImportError: cannot import name 'MODEL_FOR_VISION_2_SEQ_MAPPING_NAMES'",
            "4.57.6",
        ),
        (
            *("trl-grpo-train-sampler", GRPO, "0.15.2", "4.57.6"),
            "TypeError: GRPOTrainer._get_train_sampler() takes 1 positional argument but 2 were given",
            "4.51.3",
        ),
        (
            *("trl-kto-train-sampler", KTO, "0.17.0", "4.57.6"),
            "TypeError: KTOTrainer._get_train_sampler() takes 1 positional argument but 2 were given",
            "4.51.3",
        ),
        (
            *("trl-trainer-overrides", OLD, "0.11.4", "4.46.3"),
            "AttributeError: 'generator' object has no attribute 'generate'",
            "4.45.2",
        ),
        (
            *("trl-trainer-overrides", OLD, "0.11.4", "4.51.3"),
            "TypeError: DPOTrainer.get_batch_samples() takes 3 positional arguments but 4 were given",
            None,
        ),
        (
            *("trl-trainer-overrides", REWARD, "0.11.4", "4.46.3"),
            "TypeError: RewardTrainer.compute_loss() got an unexpected keyword argument 'num_items_in_batch'",
            "4.45.2",
        ),
        (
            *("trl-trainer-overrides", NEW, "0.12.1", "4.47.1"),
            "TypeError: DPOTrainer.log() takes 2 positional arguments but 3 were given",
            "4.46.3",
        ),
        (
            *("trl-tokenizer-argument", SFT, "0.9.6", "5"),
            "TypeError: Trainer.__init__() got an unexpected keyword argument 'tokenizer'",
            "4.45.2",
        ),
    ],
    ids=lambda value: value if value and len(value) < 30 else "",
)
def test_the_pair_ends_so_and_the_pin_is_right(name, code, trl, transformers, error, pinned):
    log = log_beside(transformers, code, trl)
    assert error in log, log[-2000:]
    assert diagnosed(log) == [(name, True)]
    if pinned is not None:
        assert not log_beside(pinned, code, trl)


def test_a_traceback_through_trl_tells_the_class_that_vllm_does_not_have():
    """As in huggingface/trl#4617: no vLLM here."""
    log = (
        'Traceback (most recent call last):\n  File "/usr/lib/python3/dist-packages/trl/trainer/grpo_trainer.py", line '
        "95, in <module>\n    from vllm.sampling_params import GuidedDecodingParams\nImportError: cannot import name "
        "'GuidedDecodingParams' from 'vllm.sampling_params' (/usr/lib/python3/dist-packages/vllm/sampling_params.py)\n"
    )
    assert diagnosed(log) == [("trl-guided-decoding", True)]
