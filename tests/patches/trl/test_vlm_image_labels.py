"""trl-vlm-image-labels: steps of TRL's own SFT trainer on images, against float64."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from rlhf_patches.patches.trl import _placeholder_labels
from rlhf_patches.patches.trl.vlm_image_labels import PATCH
from rlhf_patches.testing import PatchContract
from tests.harness.forkserver import TORCH, Level
from tests.harness.side_by_side import folder

RULE_COVERAGE = {
    "minimal scope": "test_what_is_not_affected_is_the_same",
    "no side effects": "because it makes labels of upstream's own; nothing is written to what the user holds",
    "backward compatible": ("test_what_is_not_affected_is_the_same", "test_a_processor_that_is_not_known_is_left"),
    "no new blocking": "because it is arithmetic of one batch: no lock, no collective",
    "known": "test_a_processor_that_is_not_known_is_left",
    "stay as released, bit for bit": "test_what_is_not_affected_is_the_same",
    "stay labels unless": ("test_the_loss_is_that_of_the_text", "test_a_processor_that_is_not_known_is_left"),
    "unknown words": "test_a_processor_that_is_not_known_is_left",
}
WORKER = "tests.patches.trl.vlm_image_labels_own_ranks"
AFFECTED = ("conversation", "prompts, completions")
SAME = ("without an image", "completion", "unknown processor", "own")
#: Forward and backward in float32, of two small towers.
ROUNDING = 1e-5


class TestContract(PatchContract):
    patch = PATCH
    releases = ("trl==0.22.0", "trl==1.16.0", "trl==0.21.0")
    held = RULE_COVERAGE


@pytest.fixture(scope="module", params=[None, pytest.param("trl-1.16", marks=pytest.mark.exhaustive)])
def report(request, run_ranks):
    # With Pillow, which transformers looks for once.
    folders = [str(folder(name)) for name in (request.param, "upstream-tests") if name]
    level = Level("tests.harness.loading:trl", os.pathsep.join(folders))
    (found,) = run_ranks(WORKER, *AFFECTED, *SAME, levels=(*TORCH, level), ranks=1, ACCELERATE_USE_CPU="true")
    assert found["status"] == "applied"
    return found


@pytest.mark.parametrize("case", AFFECTED)
def test_the_loss_is_that_of_the_text(report, case):
    before, after = (report[state][case] for state in ("before", "after"))
    assert after["gradient"] < ROUNDING < 0.5 < before["gradient"]
    logged, right = after["loss"]
    assert logged == pytest.approx(right, rel=ROUNDING)
    assert after["placeholders"] == 0 < before["placeholders"]
    assert before["labels"] - after["labels"] == before["placeholders"], "all other labels stay"


@pytest.mark.parametrize("case", SAME)
def test_what_is_not_affected_is_the_same(report, case):
    assert report["after"][case] == report["before"][case]


def test_how_often_it_was_met(report):
    assert (report["reached"]["asked"], report["reached"]["held"]) == (len(AFFECTED) + len(SAME), len(AFFECTED))


def test_reverted_it_is_trl_s_own_again(report):
    assert report["reverted"][AFFECTED[0]] == report["before"][AFFECTED[0]]


@pytest.mark.parametrize(
    ("module", "attributes", "wanted"),
    [
        ("transformers.models.llava.processing_llava", {"image_token_id": 7}, [-100, 8, 9]),
        ("transformers.models.a.processing_a", {"image_token_ids": [7, None], "video_token_id": 9}, [-100, 8, -100]),
        ("transformers.models.a.processing_a", {"image_token_ids": [7, 9], "image_token_id": 7}, [-100, 8, -100]),
        ("transformers.models.a.processing_a", {"image_token_id": None}, [7, 8, 9]),
        ("transformers_modules.a.processing_a", {"image_token_id": 7}, [7, 8, 9]),  # from the Hub
        ("mine", {"image_token_id": 7}, [7, 8, 9]),
        (
            "transformers.models.a.processing_a",
            {"image_token_id": 7, "video_token_id": 9, "tokenizer": SimpleNamespace(unk_token_id=9)},
            [-100, 8, 9],
        ),
    ],
)
def test_a_processor_that_is_not_known_is_left(module, attributes, wanted):
    processor = type("Processor", (), {"__module__": module, **attributes})()
    collator = SimpleNamespace(processor=processor)
    labels = torch.tensor([[7, 8, 9]])
    found = _placeholder_labels.without(collator, labels)
    assert found.tolist() == [wanted]
    assert labels.tolist() == [[7, 8, 9]], "it is another tensor"


def test_it_is_off_unless_asked_for_by_name():
    assert "TRL's collator" in PATCH.contested
