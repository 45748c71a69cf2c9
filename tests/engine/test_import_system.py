"""Never a hang: other threads import, fork and are interrupted while the hook or ``apply()`` is at work.

CPython calls ``find_spec`` under the global import lock, which its detection of deadlocks does not know; so each of
these has a process of its own, and a limit.
"""

from __future__ import annotations

import sys
import threading

from rlhf_patches import import_system
from rlhf_patches.engine import import_hooks


def test_a_signal_handler_may_watch_too(framework):
    """Wherever in our finder the signal comes. The trace function stands for it: it runs between two lines."""
    framework.write("mod", "")
    interrupted = set()

    def callback(name, module):
        pass

    def at_each_line(frame, event, argument):
        place = (frame.f_code.co_filename, frame.f_lineno)
        if place[0] in (import_hooks.__file__, import_system.__file__) and place not in interrupted:
            interrupted.add(place)
            import_hooks.watch(f"{framework.name}.mod", callback)
        return at_each_line

    def traced():
        sys.settrace(at_each_line)
        try:
            import_hooks.watch(f"{framework.name}.mod", callback)
            framework.load()
        finally:
            sys.settrace(None)
        done.set()

    done = threading.Event()
    threading.Thread(target=traced, daemon=True).start()
    assert done.wait(30), "it hangs"
    import_hooks.unwatch(f"{framework.name}.mod", callback)
    assert len(interrupted) > 20
