"""What setup.cfg cannot declare: two folders' packages under one name, and files in site-packages' root."""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

SITE_HOOK = sorted(Path(__file__).parent.joinpath("site_hook").glob("rlhf_patches*.*"))


class BuildWithSiteHook(build_py):
    """build_py, plus ``rlhf_patches.pth`` and its twin by PEP 829: ``rlhf_patches.start``, and the module it names."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # an editable install has no place for them: `rlhf-patches autoload on` writes one
            for file in SITE_HOOK:
                shutil.copyfile(file, Path(self.build_lib, file.name))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        hooks = [str(Path(self.build_lib, file.name)) for file in SITE_HOOK]
        return [*super().get_outputs(include_bytecode), *([] if self.editable_mode else hooks)]


def packages() -> list[str]:
    """Every folder with an ``__init__.py``; patches/ is installed as rlhf_patches.patches."""
    patches = [f"rlhf_patches.{name}" for name in find_packages(include=["patches", "patches.*"])]
    return [*find_packages(include=["rlhf_patches", "rlhf_patches.*"]), *patches]


setup(packages=packages(), cmdclass={"build_py": BuildWithSiteHook})
