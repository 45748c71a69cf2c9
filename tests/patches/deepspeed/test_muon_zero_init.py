"""``deepspeed-muon-zero-init``, an advice: real ZeRO-3, against Muon's definition (muon_zero_init_ranks.py)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlhf_patches.patches.deepspeed._muon_conditions import looks_flat
from tests.harness.forkserver import beside

WORKER = "tests.patches.deepspeed.muon_zero_init_ranks"


@pytest.fixture(scope="module")
def report(run_ranks):
    (found,) = run_ranks(WORKER, levels=beside("deepspeed-0.18.9", "deepspeed"), ranks=1)
    assert found["status"] == "advice"
    return found


def test_within_zero_init_it_is_not_muon(report):
    assert report["within"]["error"] > 0.5


@pytest.mark.parametrize("case", ["outside", "stage 2"])
def test_the_advised_ones_are_right(report, case):
    assert report[case]["error"] < 0.12  # Newton-Schulz in bfloat16


def test_an_affected_run_is_told_and_no_other(report):
    assert [report[case]["counts"] for case in ("outside", "stage 2", "within")] == [[0, 1], [0, 2], [1, 3]]
    assert report["outside"]["said"] == report["stage 2"]["said"] == []
    assert len(report["within"]["said"]) == 1
    assert report["adam"] == [1, 4]


@pytest.mark.parametrize("release", ["deepspeed-0.19.7", None])
def test_later_releases_are_right(run_ranks, release):
    (found,) = run_ranks(WORKER, levels=beside(release, "deepspeed"), ranks=1)
    assert found["status"] == "unaffected"
    assert found["within"]["error"] < 1e-3


def test_which_parameters_show_it():
    muon, flat = SimpleNamespace(optimizer_name="muon"), torch.nn.Parameter(torch.ones(0))
    flat.ds_shape = torch.Size([2, 3])

    def of(**named):
        return SimpleNamespace(named_parameters=lambda: named.items())

    assert looks_flat(muon, of(weight=flat))
    assert not looks_flat(muon, of(lm_head=flat, embed_tokens=flat))
    assert not looks_flat(SimpleNamespace(optimizer_name="adamw"), of(weight=flat))
    assert not looks_flat(muon, of(weight=torch.nn.Parameter(torch.ones(2, 3))))
    flat.requires_grad_(False)
    assert not looks_flat(muon, of(weight=flat, lora=torch.nn.Parameter(torch.ones(2, 3)))), "only LoRA's is trained"
    flat.requires_grad_(True)
    flat.ds_shape = torch.Size([3])
    assert not looks_flat(muon, of(weight=flat))
