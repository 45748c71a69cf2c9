"""``accelerate-optimizer-train``: what it says is so, by transformers' Trainer beside real releases of accelerate."""

from __future__ import annotations

import pytest

from tests.harness import side_by_side
from tests.harness.logs import diagnosed
from tests.harness.pairs import log_of

TRAIN = """\
import tempfile
import torch
from transformers import Trainer, TrainingArguments


class Model(torch.nn.Linear):
    def forward(self, x):
        return {"loss": super().forward(x).sum()}


settings = {"max_steps": 1, "use_cpu": True, "report_to": [], "save_strategy": "no", "optim": "adamw_torch"}
rows = [{"x": torch.ones(3)}] * 8
with tempfile.TemporaryDirectory() as folder:
    Trainer(Model(3, 1), TrainingArguments(folder, **settings), train_dataset=rows).train()
"""
#: With what it needs beside it: other packages than the environment's.
TRANSFORMERS = ("transformers==4.51.3", "tokenizers==0.21.4")


@pytest.mark.exhaustive
def test_no_step_beside_it_and_one_with_the_pin():
    folders = (str(side_by_side.folder("transformers-4.57")),)
    log = log_of(TRAIN, "accelerate==0.33.0", *TRANSFORMERS, folders=folders)
    assert "AttributeError: 'AdamW' object has no attribute 'train'" in log
    assert diagnosed(log) == [("accelerate-optimizer-train", True)]
    assert not log_of(TRAIN, "accelerate==0.34.0", *TRANSFORMERS, folders=folders)
    assert not log_of(TRAIN, "accelerate==0.33.0", "transformers==4.44.2", "tokenizers==0.19.1", folders=folders)
