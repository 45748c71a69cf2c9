"""Math-Verify's comparison of answers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from hunt.outcomes import Outcome
from hunt.trainers import trainer


@trainer("math_verify/answers")
def answers(*, thread: str = "main") -> Outcome:
    from rlhf_patches.patches.math_verify.proofs import thread_ranks

    if thread == "main":
        found = thread_ranks.compared()
    else:
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(thread_ranks.compared).result()
    return {"values": {"rewards": [float(one) for one in found]}}
