"""``rlhf-patches diagnose``: logs as launchers, collectors, notebooks and people write them."""

from __future__ import annotations

import io

import pytest

from rlhf_patches.offline import prefixes, tracebacks
from rlhf_patches.offline.frames import Frame, Reader
from rlhf_patches.offline.tracebacks import Raised
from tests.engine.offline.test_certainty import GUIDED, LOADER, SITE, found, trace

NAME = "trl-guided-decoding"
TRACE = trace(GUIDED, LOADER, f"{SITE}/trl/trainer/grpo_trainer.py:<module>")


def raised(log: str) -> list[Raised]:
    return [one for one in tracebacks.read(io.BytesIO(log.encode())) if isinstance(one, Raised)]


def prefixed(prefix: str, text: str = TRACE) -> str:
    """Each line with the prefix, in which ``@`` is a number that grows."""
    return "".join(f"{prefix.replace('@', str(10 + n))}{line}\n" for n, line in enumerate(text.splitlines()))


@pytest.mark.parametrize(
    "prefix",
    [
        "2026-03-02T10:17:@.1120457Z ",
        "worker-1: ",
        "trainer-1  | ",
        "[1,3]<stderr>:",
        "[pod/trainer-0/main] ",
        "[pod/trainer-0/main] 2026-03-02T10:17:@.1120457Z ",
        "> ",
        ">> > ",
        "[36m(TaskRunner pid=3312)[0m ",
        "Nov 28 21:00:@ node7 python[3312]: ",
        "    ",
        "ERROR 2026-03-02 10:17:@,120 trainer.py:88 - ",
    ],
)
def test_a_prefix_is_learned_from_the_log(prefix):
    assert found(prefixed(prefix)) == [(NAME, "certain")]
    assert found("step 1\n" + prefixed(prefix, "epoch 1\n" + TRACE + "epoch 2\n") + "end\n") == [(NAME, "certain")]
    without_its_head = prefixed(prefix, TRACE.partition("\n")[2])
    assert found(without_its_head) == [(NAME, "certain")]


def test_ranks_whose_prefixes_differ_by_a_number_are_two_streams():
    other = trace("KeyError: 'text'", "/x/data.py:load")
    one, two = prefixed("[1,0]<stderr>:", TRACE).splitlines(), prefixed("[1,1]<stderr>:", other).splitlines()
    two += [""] * (len(one) - len(two))
    log = "".join(f"{a}\n{b}\n" for a, b in zip(one, two, strict=True))
    assert [(each.exception, len(each.frames), each.stream) for each in raised(log)] == [
        ("KeyError", 1, "[1,1]<stderr>:"),
        ("ImportError", 2, "[1,0]<stderr>:"),
    ]


def test_what_stands_only_before_the_first_line_is_no_loss():
    (one,) = raised(TRACE.replace("Traceback", "ERROR:root:training failed: Traceback", 1))
    assert (len(one.frames), one.cut) == (2, "")
    assert found("^C" + TRACE) == [(NAME, "certain")]


def test_the_number_of_learned_prefixes_is_bounded():
    learned = prefixes.Prefixes()
    for number in range(200):
        learned.split(f"{'abcdefgh'[number % 8] * (number // 8 + 1)}: Traceback (most recent call last):")
    assert learned.split("a: x")[0] == "a:"
    assert learned.split(f"{'h' * 25}: x")[0] == ""
    assert learned.split(f"{'x' * 500} Traceback (most recent call last):")[0] == ""


LAZILY = (
    "RuntimeError: Failed to import trl.trainer.grpo_trainer because of the following error (look up to see its "
    "traceback):\n"
)


def test_the_line_below_a_lazy_import_is_its_exception():
    text = GUIDED.partition(": ")[2]
    assert found(f"{LAZILY}{text}\n") == [(NAME, "possible")]
    assert found(prefixed("[rank1]: ", f"{LAZILY}{text}\n")) == [(NAME, "possible")]
    assert found(f"{LAZILY}{LAZILY.partition(': ')[2]}{text}\n") == [(NAME, "possible")]
    assert found(f"{LAZILY}\n{text}\n") == [], "another line"
    # Its traceback is above, and shows whose it is.
    assert found(f"{TRACE}{LAZILY}{text}\n") == [(NAME, "certain")]
    of_another = TRACE.replace("trl/trainer/grpo_trainer.py", "trl_tools/grpo_trainer.py")
    assert found(f"{of_another}{LAZILY}{text}\n") == []
    assert [one.exception for one in raised(f"{LAZILY}libcudart.so.12: cannot open\nKeyError: 3\n")] == [
        "RuntimeError", "KeyError",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["File /x/trl/a.py:528, in T.__init__(self, model)"], Frame("/x/trl/a.py", "T.__init__")),
        (["File ~/run.py:51"], Frame("~/run.py", "<module>")),
        (["/x/trl/a.py in __init__(self, model)"], Frame("/x/trl/a.py", "__init__")),
        (["[/x/trl/a.py](https://localhost:8080/#) in __init__(self)"], Frame("/x/trl/a.py", "__init__")),
        (["/tmp/ipython-input-28.py in <cell line: 0>()"], Frame("/tmp/ipython-input-28.py", "<cell")),
        (["Cell In[7], line 3"], Frame("<cell>", "<module>")),
        (["│ /x/trl/a.py:528 in __init__      │"], Frame("/x/trl/a.py", "__init__")),
        (["│ /x/trl/trai │", "│ ner.py:5 in f │"], Frame("/x/trl/trainer.py", "f")),
        (["│ /x/trl/trainer.py:5 in │", "│ a_long_name │"], Frame("/x/trl/trainer.py", "a_long_name")),
        (["| /x/trl/a.py:528 in f |"], Frame("/x/trl/a.py", "f")),
        (["--> 528         super().__init__("], None),
        (["│ ❱ 528 │   super().__init__(  │"], None),
        (["loss in /x/y.py in f"], None),
    ],
)
def test_frames_of_notebooks_and_boxes(lines, expected):
    reader = Reader()
    assert [reader.read(line, active=True) for line in lines][-1] == expected


@pytest.mark.parametrize("cut", ["4 frames", "    [... skipping hidden 2 frame]", "  ...", "  [...]", "│ … │", "(...)"])
def test_frames_that_somebody_left_out(cut):
    text = trace("AssertionError: x", "/a.py:f").replace("    x\n", f"    x\n{cut}\n")
    assert [one.cut for one in raised(text)] == [tracebacks.FRAMES]


def test_a_box_in_which_the_text_is_wrapped():
    begin, end = "╭─── Traceback (most recent call last) ───╮\n", "╰──────╯\n"
    frame = f"│ {SITE}/transformers/trainer.py:1034 in │\n│ _get_dataloader      │\n"
    error = "TypeError: GRPOTrainer._get_train_sampler() takes 1 positional argument but 2"
    assert found(f"{begin}{frame}{end}{error} were given\n") == [("trl-grpo-train-sampler", "certain")]
    assert found(f"{begin}{frame}{end}{error}\nwere given\n") == [("trl-grpo-train-sampler", "possible")]
    assert found(f"{begin}{frame}{end}TypeError: f() takes 1\nargument\n") == []


def test_the_frame_that_loguru_marks():
    assert found(TRACE.replace("  File", "\n> File").replace("    x\n", "    x\n    └ 3\n")) == [(NAME, "certain")]
