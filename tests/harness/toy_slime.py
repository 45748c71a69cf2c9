"""A make-believe slime, for tests of the hook, the commands and the launcher: one built-in patch applies to it."""

from __future__ import annotations

from pathlib import Path

PATCH = "slime-no-sync-reentry"
MODEL = "slime/backends/megatron_utils/model.py"
DEFECT = "config.no_sync_func is None"
IMPORT = "import slime.backends.megatron_utils.model as model"
# Prints "applied" or "untouched", and nothing else, on standard output.
LOOK = f"{IMPORT}; print('applied' if '__import__' in model.train.__code__.co_names else 'untouched')"

TRAIN = """\
def train(config, model):
    assert config.no_sync_func is None, "When overlap_grad_reduce is True, config.no_sync_func must be None"
    config.no_sync_func = [chunk.no_sync for chunk in model]
"""


def write(folder: Path) -> Path:
    """Write the checkout, to be the working directory of ``python -c`` or on PYTHONPATH."""
    model = folder / MODEL
    model.parent.mkdir(parents=True)
    (folder / "slime" / "__init__.py").touch()  # backends and megatron_utils stay namespace packages
    model.write_text(TRAIN)
    return folder
