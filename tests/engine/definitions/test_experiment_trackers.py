"""examples/experiment_trackers.py, against objects that refuse what the real trackers refuse.

Their limits were read in mlflow 3.17.2 (mlflow/utils/validation.py) and wandb 0.31.0 (wandb/sdk/wandb_config.py), on
which the example was run too.
"""

from __future__ import annotations

import importlib.util
import json
import posixpath
import re
from pathlib import Path

import pytest

from rlhf_patches import PatchReport, Report, Status
from rlhf_patches.definitions.registry import PluginFailure
from rlhf_patches.patches import plugin

EXAMPLE = Path(__file__).parents[3] / "examples" / "experiment_trackers.py"
spec = importlib.util.spec_from_file_location("experiment_trackers", EXAMPLE)
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)


class Config(dict):
    """wandb.Config: plain values only, and what is there changes only with allow_val_change."""

    def update(self, values, allow_val_change=None):
        json.dumps(values, allow_nan=False)
        for key, value in values.items():
            assert "." not in key, "the documentation asks for dashes or underscores instead"
            if key in self and self[key] != value and not allow_val_change:
                raise ValueError(f"Attempted to change value of key {key!r}")
            self[key] = json.loads(json.dumps(value))


class Summary(dict):
    """run.summary: single values."""

    def update(self, values):
        assert all(isinstance(value, (str, int, float)) for value in values.values())
        super().update(values)


class Run:
    def __init__(self):
        self.config, self.summary = Config(), Summary()


class MLflow:
    """The functions of the module that are used, with its checks."""

    def __init__(self):
        self.params, self.tags, self.artifacts = {}, {}, {}

    def _check(self, values, longest):
        assert len(values) <= 100, "MAX_PARAMS_TAGS_PER_BATCH"
        for key, value in values.items():
            assert re.fullmatch(r"[/\w.\- ]+", key), key
            assert posixpath.normpath(key) == key
            assert not key.startswith(("/", ".."))
            assert len(key) <= 250
            assert len(str(value)) <= longest

    def log_params(self, params):
        self._check(params, 6000)
        for key, value in params.items():
            assert self.params.setdefault(key, str(value)) == str(value), "Changing param values is not allowed"

    def set_tags(self, tags):
        self._check(tags, 8000)
        self.tags.update({key: str(value) for key, value in tags.items()})

    def log_dict(self, dictionary, artifact_file):
        assert Path(artifact_file).suffix == ".json"
        self.artifacts[artifact_file] = json.loads(json.dumps(dictionary))


def _report(status):
    """All built-in patches, with a reason as long as they come."""
    rows = [
        PatchReport(p.name, status, "why " * 2000, p.distribution, "1.0+cu128.é", p.versions, "rlhf-patches")
        for p in plugin.rlhf_patches()
    ]
    return Report(tuple(rows), (PluginFailure("plug", "broken\n" * 50),))


@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_the_report_arrives_and_can_be_logged_again(tracker):
    before, after = _report(Status.PENDING), _report(Status.APPLIED)
    if tracker == "wandb":
        run = Run()
        example.log_to_wandb(run, before)
        example.log_to_wandb(run, after)
        whole, flat = run.config["rlhf_patches"], run.summary
    else:
        mlflow = MLflow()
        example.log_to_mlflow(mlflow, before)
        example.log_to_mlflow(mlflow, after)
        whole, flat = mlflow.artifacts["rlhf_patches.json"], mlflow.tags
        assert mlflow.params["rlhf_patches/version/megatron-core"] == "1.0+cu128.é"
    assert whole == after.to_dict()
    assert flat == {f"rlhf_patches/{patch.name}": "applied" for patch in plugin.rlhf_patches()}


def test_nothing_installed_is_no_parameters():
    mlflow = MLflow()
    example.log_to_mlflow(mlflow, Report((PatchReport("a-bug", Status.ABSENT, "", "dist", None, "", "tests"),)))
    assert (mlflow.params, mlflow.tags) == ({}, {"rlhf_patches/a-bug": "absent"})
