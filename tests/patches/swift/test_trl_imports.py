"""``swift-*-trl-imports``: what they say is so, by ms-swift beside older releases of TRL."""

from __future__ import annotations

import pytest

from tests.harness.logs import diagnosed
from tests.harness.pairs import log_of


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("trainer", "trl", "error"),
    [
        ("grpo", "0.16.1", "ImportError: cannot import name 'RepeatSampler' from 'trl.trainer.grpo_trainer'"),
        ("gkd", "0.21.0", "ImportError: cannot import name 'RepeatSampler' from 'trl.trainer.utils'"),
    ],
)
def test_the_pair_ends_so_and_the_environments_own_is_right(trainer, trl, error):
    code = f"import swift.rlhf_trainers.{trainer}_trainer"
    log = log_of(code, f"trl=={trl}")
    assert error in log
    assert diagnosed(log) == [(f"swift-{trainer}-trl", True)]
    assert not log_of(code)
