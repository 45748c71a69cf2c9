"""The fixtures of make-believe frameworks, of plugins that patch them, and of reports."""

from tests.harness.archives import untouched
from tests.harness.example_plugin import with_example, with_toy
from tests.harness.fake_framework import engine, framework, nothing_said_yet, quiet
from tests.harness.plugins import site
from tests.harness.report_lines import file
from tests.harness.toy_slime_fixtures import slime, slime_wheel

__all__ = [
    "engine",
    "file",
    "framework",
    "nothing_said_yet",
    "quiet",
    "site",
    "slime",
    "slime_wheel",
    "untouched",
    "with_example",
    "with_toy",
]
