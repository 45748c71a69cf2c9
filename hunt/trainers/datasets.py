"""A streaming data set, shuffled through a buffer, resumed from its state."""

from __future__ import annotations

import itertools

from hunt.outcomes import Outcome
from hunt.trainers import trainer


@trainer("datasets/shuffled")
def shuffled(
    *, rows: int = 8, micro_batch: int = 2, steps: int = 4, resume_at: int | None = None, dropout: float = 0.0
) -> Outcome:
    """How often each example comes, and the first one; there is no model to have ``dropout``."""
    import datasets

    def made(epoch: int) -> datasets.IterableDataset:
        whole = datasets.Dataset.from_dict({"row": [*range(rows)]}).to_iterable_dataset(num_shards=2)
        found = whole.shuffle(seed=3, buffer_size=4)
        found.set_epoch(epoch)
        return found

    seen: list[int] = []
    for epoch in range(-(-steps * micro_batch // rows)):
        stream = made(epoch)
        of_epoch = iter(stream)
        before = 0 if resume_at is None else resume_at * micro_batch - epoch * rows
        if 0 < before < rows:
            seen += [row["row"] for row in itertools.islice(of_epoch, before)]
            state, stream = stream.state_dict(), made(epoch)
            stream.load_state_dict(state)
            of_epoch = iter(stream)
        seen += [row["row"] for row in of_epoch]
    return {"samples": {"times each": [*(seen.count(row) for row in range(rows)), *seen[:1]]}}
