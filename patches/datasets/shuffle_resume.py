"""An advice for a shuffled IterableDataset that is resumed from its state."""

from __future__ import annotations

from rlhf_patches import Advice, Condition, Guard, Shape, Variant

_TARGETS = tuple(
    f"datasets.iterable_dataset:BufferShuffledExamplesIterable.{method}" for method in ("__iter__", "_iter_arrow")
)

ADVICE = Advice(
    name="datasets-shuffle-resume",
    summary="a shuffled IterableDataset that is resumed gives some examples twice and others never",
    harm="wrong data",
    bug="after load_state_dict() of a shuffled IterableDataset, some examples come twice and others never",
    when="IterableDataset.shuffle(buffer_size) and load_state_dict(), also through torchdata's StatefulDataLoader",
    symptom="""\
A streaming data set with `.shuffle(buffer_size=...)` is resumed with `load_state_dict`, or with
`use_stateful_dataloader=True` of accelerate. The rest of the epoch has examples that were trained already, and lacks
others. Of 1,000 examples with a buffer of 100, resumed after 300: 12 twice, 62 never. datasets warns that the buffer is
refilled. It does not say that examples come twice.

`Trainer` does not load this state. It reads the examples again and skips them, which is exact.""",
    cause="""\
The state has the place up to which examples were read, and not the buffer: those in the buffer are lost. Since 5.1.0
the state goes back to the start of a table and counts the examples of it that were given. After resuming, that table is
shuffled with others, so other examples are skipped, and those that were given come again.

Releases before 5.1.0 lose the buffer too, as datasets documents and warns, but give no example twice.""",
    what_to_do="""\
Do not load the state. Iterate from the start with the same seed and epoch, and skip the examples that were trained:
`itertools.islice(dataset, n, None)`, `accelerate.skip_first_batches`, or `Trainer` without `ignore_data_skip`. This is
exact, and reads the skipped examples again. Or resume only where an epoch ends. Or shuffle with `Dataset.shuffle`
before `to_iterable_dataset`, which needs no buffer: the state of such a data set is exact.

There is no repair here. An exact one needs the content of the buffer in each state (`buffer_size` examples, which
StatefulDataLoader copies with each batch), or a place to read it again from. Both are another format of the state,
which datasets without the repair could not load.""",
    references=(
        "https://github.com/huggingface/datasets/issues/7901",
        "https://github.com/huggingface/datasets/pull/8408",
    ),
    variants=(
        Variant(
            Guard("datasets", ">=5.1.0,<=5.2.0"),
            tuple(Shape(target, "rng.permutation(current_len)", matches=2) for target in _TARGETS),
        ),
    ),
    obsolete_when="when the oldest datasets in use resumes exactly; 5.2.0, the newest, does not",
    conditions=tuple(Condition(target, f"{__package__}._conditions:resumed") for target in _TARGETS),
)
