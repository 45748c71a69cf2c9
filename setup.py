"""Puts the site hook into the wheel: setuptools has no declaration for files in site-packages' root."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithSiteHook(build_py):
    """build_py, plus ``rlhf_patches.pth`` and its PEP 829 twin ``rlhf_patches.start``."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # an editable install has no place for them: `rlhf-patches autoload on` writes one
            for file in sorted(Path(__file__).parent.joinpath("site_hook").iterdir()):
                shutil.copyfile(file, Path(self.build_lib, file.name))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        hooks = [str(Path(self.build_lib, name)) for name in ("rlhf_patches.pth", "rlhf_patches.start")]
        return [*super().get_outputs(include_bytecode), *([] if self.editable_mode else hooks)]


setup(cmdclass={"build_py": BuildWithSiteHook})
