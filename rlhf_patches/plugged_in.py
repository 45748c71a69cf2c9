"""The plugin that verl and vLLM import in each of their processes, for workers without a site hook.

verl only imports it (``verl.plugins``, at ``import verl``), vLLM also calls it (``vllm.general_plugins``). Like the
site hook it is off without RLHF_PATCHES_AUTOLOAD. Both frameworks log a plugin's exception and continue; but the hook
is installed by then, and the next import of a framework raises the exception again.
"""

from . import site_hook

site_hook.install()
site_hook.load_now(only_if_late=True)


def vllm() -> None:
    """Do nothing: the import has installed the hook."""
