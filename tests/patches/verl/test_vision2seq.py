"""``verl-vision2seq``: what it says is so, by the real pair of releases."""

from __future__ import annotations

import pytest

from tests.harness.logs import diagnosed
from tests.harness.pairs import log_of

CODE = "import verl.utils.model"


@pytest.mark.exhaustive
@pytest.mark.parametrize("release", ["0.6.0", "0.7.0"])
def test_it_cannot_be_imported_and_either_pin_is_right(release):
    log = log_of(CODE, f"verl=={release}", "transformers==5.0.0", "huggingface-hub==1.3.0")
    assert "ImportError: cannot import name 'AutoModelForVision2Seq' from 'transformers'" in log
    assert diagnosed(log) == [("verl-vision2seq", True)]
    assert not log_of(CODE, f"verl=={release}"), "beside the environment's transformers 4"
    assert not log_of(CODE, "verl==0.7.1", "transformers==5.0.0", "huggingface-hub==1.3.0")
