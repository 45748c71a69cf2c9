"""transformers-accumulation-scale: two trainers of TRL 1.5.1 that believed as Trainer does; SFTTrainer, which is right.

accumulation_scale_trl_ranks.py trains a step of each.
"""

from __future__ import annotations

import pytest

from tests.harness.forkserver import TORCH, TRL, Level
from tests.harness.side_by_side import folder

WORKER = "tests.patches.transformers.accumulation_scale_trl_ranks"
# Of float32 sums over less than a thousand numbers, relative to the whole gradient.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def report(run_ranks):
    (found,) = run_ranks(WORKER, levels=(*TORCH, Level("tests.harness.loading:trl", str(folder("trl-1.5")))), ranks=1)
    assert found["status"] == "applied"
    return found


@pytest.mark.parametrize("trainer", ["PRM", "GKD"])
def test_eight_samples_one_by_one_are_as_at_once(report, trainer):
    for state in ("before", "reverted"):
        assert report[state][f"{trainer} 8"]["times"] == pytest.approx(8, rel=TOLERANCE)
    for found in (report["before"][f"{trainer} 1"], report["after"][f"{trainer} 1"], report["after"][f"{trainer} 8"]):
        assert found["off"] < TOLERANCE


@pytest.mark.parametrize(
    ("release", "said"),
    [
        (None, 0),
        pytest.param("trl-1.5", 0, marks=pytest.mark.exhaustive),
        pytest.param("trl-1.16", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_sft_keeps_its_bits(run_ranks, release, said):
    """The commonest run there is: of SFTTrainer nothing is said.

    Since TRL 1.15 it does not call `Trainer.compute_loss`, and what a subclass hands on cannot be seen.
    """
    levels = (*TORCH, Level("tests.harness.loading:trl", str(folder(release)))) if release else TRL
    (found,) = run_ranks(WORKER, "--sft", levels=levels, ranks=1)
    assert found["status"] == "applied"
    heard = found["after"].pop("said")
    for state in ("before", "reverted"):
        assert not found[state].pop("said")
        assert found[state] == found["after"]
    assert len(heard) == said
    assert all("OwnSFT" in line for line in heard)
    assert len(found["after"]["SFTTrainer"]) > 1000
