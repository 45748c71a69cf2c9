"""What verl and vLLM import in each of their processes, by their own plugin groups: for workers without a site hook.

verl only imports it (``verl.plugins``, at ``import verl``), vLLM calls it as well (``vllm.general_plugins``). Off
unless RLHF_PATCHES_AUTOLOAD says otherwise, as the site hook. Both log what a plugin raises and go on; but the hook is
in place by then, and the next import of a framework raises it anew.
"""

from . import site_hook

site_hook.install()
site_hook.load_now(only_if_late=True)


def vllm() -> None:
    """Nothing more to do: the import has done it."""
