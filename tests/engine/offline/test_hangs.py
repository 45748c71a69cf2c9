"""``rlhf-patches diagnose``: what is said of a run that stands still.

Texts of gloo and of faulthandler are those of torch 2.13.0 on Python 3.11, two processes, rank 1 late; only the paths
are shorter. NCCL needs GPUs: its lines are those that users have quoted in hiyouga/LlamaFactory#8261, pytorch#118369
and vllm#6042. The stack of a collective has the form that torch's FlightRecorder::Entry::getTraceback states, and
py-spy's that of NVIDIA/nccl#1258; the frames in both are faulthandler's.
"""

from __future__ import annotations

import io
import json
import tracemalloc

import pytest

from rlhf_patches.definitions import registry
from rlhf_patches.offline import diagnose, hangs, tracebacks

GLOO = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/app/train.py", line 20, in main
[rank0]:     if rank == 0: gather_object([{"a": 1}])
[rank0]:                   ^^^^^^^^^^^^^^^^^^^^^^^^^
[rank0]:   File "/site-packages/accelerate/utils/operations.py", line 521, in gather_object
[rank0]:     return _gpu_gather_object(object)
[rank0]:            ^^^^^^^^^^^^^^^^^^^^^^^^^^
[rank0]:   File "/site-packages/accelerate/utils/operations.py", line 500, in _gpu_gather_object
[rank0]:     torch.distributed.all_gather_object(output_objects, object)
[rank0]:   File "/site-packages/torch/distributed/c10d_logger.py", line 83, in wrapper
[rank0]:     return func(*args, **kwargs)
[rank0]:            ^^^^^^^^^^^^^^^^^^^^^
[rank0]:   File "/site-packages/torch/distributed/distributed_c10d.py", line 3513, in all_gather_object
[rank0]:     all_gather(object_size_list, local_size, group=group)
[rank0]:   File "/site-packages/torch/distributed/c10d_logger.py", line 83, in wrapper
[rank0]:     return func(*args, **kwargs)
[rank0]:            ^^^^^^^^^^^^^^^^^^^^^
[rank0]:   File "/site-packages/torch/distributed/distributed_c10d.py", line 4287, in all_gather
[rank0]:     work.wait()
[rank0]: RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:129] \
Timed out waiting 4000ms for send operation to complete
"""
BARRIER = (
    "[rank0]:[E1123 07:19:22.902698632 ProcessGroupGloo.cpp:67] [Rank 0]: Rank 1 failed to pass monitoredBarrier in \
3000 ms\n"
)
FAULTHANDLER = """\
Timeout (0:00:04)!
Thread 0x00007f1c3101db80 (most recent call first):
  File "/site-packages/torch/distributed/distributed_c10d.py", line 4287 in all_gather
  File "/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/site-packages/torch/distributed/distributed_c10d.py", line 3513 in all_gather_object
  File "/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/app/train.py", line 30 in main
  File "/site-packages/torch/distributed/elastic/multiprocessing/errors/__init__.py", line 367 in wrapper
  File "/app/train.py", line 33 in <module>
"""
PY_SPY = """\
Process 131584: python -u train.py
Python v3.11.4 (/usr/bin/python3.11)

Thread 131584 (active): "MainThread"
    all_gather (torch/distributed/distributed_c10d.py:4287)
    wrapper (torch/distributed/c10d_logger.py:83)
        Arguments:
            args: (<Tensor at 0x7f01>)
    all_gather_object (torch/distributed/distributed_c10d.py:3513)
    wrapper (torch/distributed/c10d_logger.py:83)
    main (train.py:30)
    <module> (train.py:33)
Thread 131699 (idle): "Thread-1"
    wait (threading.py:331)
"""
NCCL = "".join(
    f"[rank{rank}]:[E602 11:17:52.400612945 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=2847, OpType=ALLREDUCE, NumelIn=197140480, NumelOut=197140480, "
    "Timeout(ms)=600000) ran for 600080 milliseconds before timing out.\n"
    for rank in (0, 2)
)
OLDER = """\
[E ProcessGroupNCCL.cpp:458] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=96120, \
OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 25624887 milliseconds before timing out.
"""
TERMINATED = """\
(RayWorkerWrapper pid=4009) [rank1]:[E ProcessGroupNCCL.cpp:1414] [PG 1 Rank 1] Process group watchdog thread \
terminated with exception: [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=158046, \
OpType=GATHER, \
NumelIn=2867200, NumelOut=0, Timeout(ms)=600000) ran for 600027 milliseconds before timing out.
"""
OF_RECORDER = """\
[rank3]:[E710 18:00:32.427312432 ProcessGroupNCCL.cpp:801] Stack trace of the failed collective:\x20
#0 all_gather from /site-packages/torch/distributed/distributed_c10d.py:4287
#1 wrapper from /site-packages/torch/distributed/c10d_logger.py:83
#2 all_gather_object from /site-packages/torch/distributed/distributed_c10d.py:3513
#3 main from /app/train.py:30
"""


def signs(log):
    """The timeouts of a log, and its stacks."""
    read = list(tracebacks.read(io.BytesIO(log.encode())))
    return tuple([one for one in read if isinstance(one, kind)] for kind in (hangs.Timeout, hangs.Stack))


def found(log):
    """The bugs."""
    return [
        (one.item.patch.name, one.match)
        for one in diagnose.diagnose(tracebacks.read(io.BytesIO(log.encode())), registry.load()[0])[0]
    ]


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (GLOO, [("gloo", "", "", "4000", "rank 0")]),
        (BARRIER, [("gloo", "monitored_barrier", "", "3000", "rank 0")]),
        (NCCL, [("NCCL", "ALLREDUCE", "2847", "600000", f"rank {rank}") for rank in (0, 2)]),
        (OLDER, [("NCCL", "ALLREDUCE", "96120", "1800000", "rank 0")]),
        (TERMINATED, [("NCCL", "GATHER", "158046", "600000", "rank 1")]),
        ("Watchdog caught collective operation timeout: nothing\n[Rank 1] Timed out waiting\n", []),
    ],
    ids=["gloo", "barrier", "NCCL", "older NCCL", "terminated", "none"],
)
def test_timeouts(log, expected):
    timeouts, _ = signs(log)
    assert [(one.backend, one.collective, one.sequence, one.milliseconds, one.rank) for one in timeouts] == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "[PG ID 0 PG GUID 0 Rank 1] Received a dump signal due to a collective timeout from  rank 34 and",
            ("a collective of rank 34 has timed out", "rank 1"),
        ),
        (
            "[PG 0 (default_pg) Rank 7] Received a dump signal due to a collective timeout from this local rank and we",
            ("a collective of this local rank has timed out", "rank 7"),
        ),
        (
            "[PG ID 0 PG GUID 0 Rank 5] Observed flight recorder dump signal from another rank via TCPStore",
            ("a collective of another rank has timed out", "rank 5"),
        ),
        (
            "[F301 a.cpp:1] [PG ID 0 PG GUID 0 Rank 12] ProcessGroupNCCL's watchdog got stuck for 480 seconds without",
            ("NCCL's watchdog has made no progress for 480 s: a call of CUDA or NCCL does not return", "rank 12"),
        ),
    ],
)
def test_what_ranks_log_of_others(line, expected):
    assert [(one.notice, one.rank) for one in signs(f"step 1\n{line}\n")[0]] == [expected]


def timed_out(rank, collective, group="0"):
    return NCCL.splitlines()[0].replace("[Rank 0]", f"[PG ID {group} PG GUID 0 Rank {rank}]").replace(
        "ALLREDUCE", collective
    ) + "\n"  # fmt: skip


@pytest.mark.parametrize(("other", "differ"), [("ALLGATHER", True), ("ALLREDUCE", False)])
def test_ranks_in_different_collectives_of_one_number(said, tmp_path, other, differ):
    log = tmp_path / "train.log"
    log.write_text(timed_out(0, "ALLREDUCE") + timed_out(1, other))
    out = " ".join(said("diagnose", log)[1].split())
    assert (
        f"number 2847 is ALLREDUCE on rank 0 and {other} on rank 1: these ranks run different code" in out
    ) is differ
    log.write_text(timed_out(0, "ALLREDUCE") + timed_out(1, other, group="3"))
    assert "different code" not in said("diagnose", log)[1], "numbers of two groups have nothing to do with each other"


ROLLOUT = """\
Thread 5120 (idle): "MainThread"
    broadcast_object_list (torch/distributed/distributed_c10d.py:3460)
    broadcast_object_list (accelerate/utils/operations.py:700)
    _generate (trl/trainer/grpo_trainer.py:1801)
    _generate_and_score_completions (trl/trainer/grpo_trainer.py:2454)
    training_step (transformers/trainer.py:4061)
"""


def test_a_wait_of_a_rollout_is_no_deadlock_of_metrics():
    assert found(ROLLOUT) == found(ROLLOUT + NCCL) == []
    direct = ROLLOUT.replace("    _generate (trl/trainer/grpo_trainer.py:1801)\n", "")
    assert found(direct) == [("trl-metrics-deadlock", "possible")]


def test_an_interrupt_shows_where_a_rank_waited():
    interrupted = GLOO[: GLOO.index("[rank0]: RuntimeError")] + "[rank0]: KeyboardInterrupt\n"
    assert found(within(interrupted, *HANGS["trl-metrics-deadlock"])) == [("trl-metrics-deadlock", "possible")]
    assert found(interrupted) == []


@pytest.mark.parametrize("before", ["", "step 1\n", "Fatal Python error: Aborted\n\n"])
@pytest.mark.parametrize("after", ["", "\n", "step 2\n"])
@pytest.mark.parametrize("log", [FAULTHANDLER, PY_SPY, OF_RECORDER], ids=["faulthandler", "py-spy", "torch"])
def test_stacks(log, before, after):
    _, stacks = signs(before + log + after)
    first = stacks[0]
    assert hangs.collective(first.frames) == "all_gather_object"
    assert (hangs.caller(first.frames).function, first.frames[0].function) == ("main", "all_gather")
    assert first.frames[-1].function == ("main" if log is OF_RECORDER else "<module>")
    assert [stack.frames[0].function for stack in stacks[1:]] == (["wait"] if log is PY_SPY else [])


def test_the_current_thread_and_names_of_threads():
    log = FAULTHANDLER.replace("Thread 0x00007f1c3101db80", "Current thread 0x00007f1c3101db80 [python]")
    log += '\nCurrent thread\'s C stack trace (most recent call first):\n  Binary file "/bin/python", at main+0x1\n'
    assert len(signs(log)[1]) == 1


def within(log, function, file):
    """The same stack, called by another function."""
    return log.replace("main", function).replace("/app/train.py", f"/site-packages/{file}").replace("train.py", file)


HANGS = {
    "trl-metrics-deadlock": ("_generate_and_score_completions", "trl/trainer/grpo_trainer.py"),
    "trl-chunked-nll-zero3": ("_chunked_cross_entropy_loss", "trl/trainer/sft_trainer.py"),
    "trl-chunked-divergence-zero3": ("_chunked_divergence_loss", "trl/trainer/distillation_trainer.py"),
    "torch-stale-build-lock": ("_jit_compile", "torch/utils/cpp_extension.py"),
    "trl-vllm-serve-dead-worker": ("main", "trl/scripts/vllm_serve.py"),
    "accelerate-fsdp2-load-by-position": ("fsdp2_load_full_state_dict", "accelerate/utils/fsdp_utils.py"),
}


def test_which_patches_are_for_a_hang():
    assert {item.patch.name for item in registry.load()[0] if item.patch.harm == "hang"} == set(HANGS)


@pytest.mark.parametrize("bug", HANGS)
@pytest.mark.parametrize(
    "log", [FAULTHANDLER, PY_SPY, OF_RECORDER, GLOO], ids=["faulthandler", "py-spy", "torch", "gloo"]
)
def test_a_known_bug_is_possible(log, bug):
    assert found(within(log, *HANGS[bug])) == [(bug, "possible")]
    assert found(log) == []


def test_a_server_waits_for_its_worker():
    """As faulthandler shows it: the endpoint, the loop of uvicorn in between left out, and the command's function."""
    waiting = f"""\
{FAULTHANDLER.splitlines()[1]}
  File "/usr/lib/python3.11/multiprocessing/connection.py", line 395 in _recv
  File "/usr/lib/python3.11/multiprocessing/connection.py", line 430 in _recv_bytes
  File "/usr/lib/python3.11/multiprocessing/connection.py", line 250 in recv
  File "/site-packages/trl/scripts/vllm_serve.py", line 575 in generate
  File "/site-packages/trl/scripts/vllm_serve.py", line 700 in main
"""
    assert found(waiting) == [("trl-vllm-serve-dead-worker", "possible")]
    assert found(waiting.replace("in main", "in make_parser")) == []
    assert found(waiting.replace("in recv\n", "in poll\n")) == []


def test_a_process_within_the_function_may_be_at_work():
    working = within("".join(FAULTHANDLER.splitlines(True)[:2] + FAULTHANDLER.splitlines(True)[6:]),
                     *HANGS["trl-metrics-deadlock"])  # fmt: skip
    assert found(working) == []
    assert found(working + NCCL) == [("trl-metrics-deadlock", "possible")]


def test_what_is_said(said, tmp_path):
    (tmp_path / "rank_0.log").write_text(within(FAULTHANDLER, *HANGS["trl-metrics-deadlock"]))
    (tmp_path / "rank_1.log").write_text(NCCL + BARRIER)
    status, out, err = said("diagnose", tmp_path)
    one, other = tmp_path / "rank_0.log", tmp_path / "rank_1.log"
    assert (status, err) == (1, "")
    assert "    ALLREDUCE number 2847 of NCCL after 600 s: rank 0, rank 2; first at " in out
    assert f"    monitored_barrier of gloo after 3 s: rank 0; first at {other} line 3 " in out
    called = "_generate_and_score_completions in /site-packages/trl/trainer/grpo_trainer.py"
    assert f"    all_gather_object, called by {called}: rank 0; first at {one} line 2 (rank 0)\n" in out
    assert "trl-metrics-deadlock: possible (a stack passes through its function); first at" in out
    found = json.loads(said("diagnose", "--json", tmp_path)[1])
    assert [group["collective"] for group in found["timeouts"]] == ["ALLREDUCE", "monitored_barrier"]
    assert found["stacks"][0]["ranks"] == ["rank 0"]
    assert said("diagnose", "--quiet", one)[0] == 1


def test_a_timeout_alone_is_understood(said, tmp_path):
    log = tmp_path / "train.log"
    log.write_text(NCCL)
    status, out, _ = said("diagnose", log)
    assert (status, "py-spy dump" in out, "No known bug in 0 exceptions" in out) == (0, True, True)


@pytest.mark.one_python
@pytest.mark.parametrize(
    "line",
    [
        "Thread 1 (active): \"" + "a" * 60_000,
        "[" * 60_000 + "Rank 1] Watchdog",
        "[a Rank 1" * 7_000 + "Watchdog",
        "Stack trace of the failed" * 2_000,
        "Rank 1] Received a dump signal due to" * 1_500,
        "[PG 1 " * 9_000 + "Rank 1] Watchdog caught collective operation timeout: WorkNCCL(OpType=A",
        "    f (" + "(" * 60_000,
        "    " + "f" * 60_000 + " (x",
        "#0 f from " + ":1" * 30_000 + "x",
        "[Rank 1]: Ranks " + "1, " * 20_000,
    ],
    ids=lambda line: ascii(line[:12]),
)  # fmt: skip
def test_memory_and_time_are_bounded(line):
    """Of many streams, with many frames, of long names; and of lines that could take the square of their length."""
    logs = "".join(
        f"[rank{rank}]: Thread 0x{rank} (most recent call first):\n"
        + f'[rank{rank}]:   File "{"x" * 4000}", line 1 in f\n' * 110
        for rank in range(4)
    )
    many = "".join(f"[rank{rank}]: Thread 1 (idle)\n[rank{rank}]:     f (a.py:1)\n" for rank in range(500))
    data = (logs + many + f"Thread 1 (idle)\n{line}\n" * 20).encode()
    tracemalloc.start()
    stacks = [one for one in tracebacks.read(io.BytesIO(data)) if isinstance(one, hangs.Stack)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 2**20
    assert all(len(stack.frames) <= 100 and len(stack.frames[0].file) <= 500 for stack in stacks)
    standing = hangs.Standing()
    for number in range(200):
        standing.add(hangs.Timeout("NCCL", f"OP{number}", "", "", 1, "", ""))
    assert (len(standing.timeouts), standing.count) == (64, 200)
