"""``rlhf-patches report``: one run's processes, what they have in common, and who differs."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource

import pytest

from rlhf_patches import cli
from rlhf_patches.runs import report_reader, report_summary


def line(pid, status="applied", *, host="node-a", reason="dist 1.0 is affected", version="1.0", world=None, **more):
    """What a process of rank ``pid`` writes."""
    row = {"name": "a-bug", "status": status, "reason": reason, "distribution": "dist", "version": version}
    row |= {"guard": "", "plugin": "rlhf-patches"}
    return {
        "host": host,
        "pid": pid,
        "rank": str(pid),
        "world_size": world and str(world),
        "process": f"1-{pid}-99",
        "started": f"2026-01-02T03:04:{pid % 60:02}.000+00:00",
        "ended": "exit",
        "python": "3.11.7",
        "rlhf_patches": "0.1.0",
        "versions": {"dist": version} if version else {},
        "patches": [row],
        "plugin_failures": [],
        **more,
    }


@pytest.fixture
def report(tmp_path, capsys):
    """Writes the lines and runs the command; returns status, standard output and standard error."""

    def run(lines, *options, padding=100):
        file = tmp_path / "run.jsonl"
        texts = [each if isinstance(each, str) else json.dumps(each) + " " * padding for each in lines]
        file.write_text("\n".join(texts) + "\n")
        status = cli.main(["report", str(file), *options])
        return status, *capsys.readouterr()

    return run


def test_all_the_same(report):
    lines = [line(pid, host=f"node-{'ab'[pid // 4]}", world=8) for pid in range(8)]
    status, out, err = report(lines)
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "8 processes: 4 on node-a, 4 on node-b; started 2026-01-02T03:04:00.000+00:00 to 2026-01-02T03:04:07.000+00:00",
        "8 exited normally",
        "",
        "No differences, nothing refused or failed.",
        "",
        "a-bug  applied in 8",
    ]
    assert report(lines, "--quiet") == (0, "", "")


def test_patches_for_other_releases_are_counted(report):
    made = line(0)
    made["patches"] += [{**made["patches"][0], "name": f"{n}-bug", "status": "unaffected"} for n in "bc"]
    assert report([made])[1].splitlines()[-2:] == ["a-bug  applied in 1", "2 patches for other releases"]


def watched(pid, worst, warning="", status="applied", values=10):
    """A line with a watch that has seen one figure."""
    made = line(pid)
    found = {"worst": worst, "at": f"step {pid}", "values": values} | ({"warning": warning} if warning else {})
    row = {**made["patches"][0], "name": "fw-watch", "kind": "watch", "status": status}
    made["patches"].append({**row, "observations": {"log-probabilities": found} if status == "applied" else {}})
    return made


def test_what_was_watched_and_the_worst_of_it(report):
    """Processes may differ in what they watch, and a watch that cannot look is no problem."""
    lines = [watched(0, 0.01), watched(1, 0.02), watched(2, 0, status="refused"), watched(3, 0, status="disabled")]
    status, out, err = report(lines)
    assert (status, err) == (0, "")
    assert out.splitlines()[3:] == [
        "No differences, nothing refused or failed.",
        "",
        "fw-watch, log-probabilities: 0.02 at worst, at step 1, of 20 (node-a pid 1 rank 1)",
        "",
        "a-bug  applied in 4",
    ]
    (found,) = json.loads(report(lines, "--json")[1])["watched"]
    assert (found["watch"], found["figure"], found["worst"], found["pid"]) == ("fw-watch", "log-probabilities", 0.02, 1)


@pytest.mark.parametrize(("worst", "shown"), [(0.31, "0.31"), ("nan", "nan")])
def test_what_a_watch_has_told_is_to_be_looked_at(report, worst, shown):
    warning = "they differ by much at step 1 (limit 0.1)"
    lines = [watched(0, 0.01), watched(1, worst, warning), watched(2, 0.05, warning)]
    status, out, _ = report(lines)
    assert status == 1
    assert f"fw-watch, log-probabilities: {shown} at worst, at step 1, of 30 (node-a pid 1 rank 1)" in out
    assert f"1 problem:\n- fw-watch: {warning} (node-a pid 1 rank 1, node-a pid 2 rank 2)" in out
    assert json.loads(report(lines, "--json")[1])["watched"][0]["worst"] == worst


def reached(pid, ended="exit", **found):
    """A line of a process in which a patch counts its calls, and another patch's place was never reached."""
    made = {**line(pid), "ended": ended}
    (row,) = made["patches"]
    more = {**row, "name": "b-bug", "reached": {"calls": 0}}
    return {**made, "patches": [{**row, "reached": {"measure": "divisor x", **found}}, more]}


def test_how_often_a_place_was_reached_in_all(report):
    lines = [
        reached(0, calls=8, asked=8, held=8, least=0.5, most=0.5),
        reached(1, calls=1000, asked=1000, held=0),
        reached(2, calls=0, asked=0, held=0),
    ]
    status, out, err = report(lines)
    assert (status, err) == (0, "")
    assert out.splitlines()[5:8] == [
        "a-bug: called 1,008 times; bug condition true in 8 (divisor x 0.5), repaired (2 processes)",
        "never called: b-bug",
        "",
    ]
    found, never = json.loads(report(lines, "--json")[1])["reached"]
    assert found == {
        **{"patch": "a-bug", "calls": 1008, "asked": 1008, "held": 8, "processes": 2},
        **{"least": 0.5, "most": 0.5, "measure": "divisor x"},
    }
    assert never == {"patch": "b-bug", "calls": 0, "processes": 0}


def test_what_a_killed_process_has_counted_may_be_more(report):
    out = report([reached(0, ended=None, calls=8, asked=8, held=0)])[1]
    assert "a-bug: called 8 times; bug condition true in 0: not affected so far (1 process)" in out
    ended = report([reached(0, calls=8, asked=8, held=0)])[1]
    assert "called 8 times; bug condition true in 0: this run was not affected (1 process)" in ended
    assert "for processes that were killed or still run, the counts are from their last lines" in out


@pytest.mark.parametrize(
    "found", [{"calls": "8"}, {"calls": -1}, {"calls": True}, {"calls": 1, "least": [], "most": 1}, {}, {"calls": 1.5}]
)
def test_counts_that_are_none(report, found):
    assert "unreadable: line 2" in report([line(0), reached(1, **found)])[1]


def test_an_engine_is_told_from_the_trainer_that_has_its_rank(report):
    lines = [line(0), {**line(1, status="refused"), "rank": "0", "name": "VLLM::EngineCore"}]
    assert "(node-a pid 1 rank 0 VLLM::EngineCore)" in report(lines)[1]
    assert '"rank": "0", "name": "VLLM::EngineCore"' in " ".join(report(lines, "--json")[1].split())


def test_who_differs_is_named(report):
    lines = [line(pid) for pid in range(7)] + [line(7, "disabled", host="node-b", reason="disabled by you")]
    status, out, _ = report(lines)
    assert status == 1
    assert "a-bug differs: applied in 7 processes, but disabled in node-b pid 7 rank 7 (disabled by you)" in out
    status, out, err = report(lines, "--quiet")
    assert (status, out, err.count("\n")) == (1, "", 1)


@pytest.mark.parametrize("status", ["refused", "failed"])
def test_what_was_refused_or_failed_is_said_even_when_all_agree(report, status):
    result, out, _ = report([line(pid, status, reason="not recognized") for pid in range(20)])
    assert result == 1
    assert f"- a-bug {status} in 20 (node-a pid 0 rank 0, node-a pid 1 rank 1, " in out
    assert "and 12 more): not recognized\n" in out
    assert "differs" not in out


def test_an_exception_is_no_end_in_order(report):
    status, out, _ = report([line(0), line(1, ended="exception OSError"), line(2, ended=None)])
    assert status == 0
    said = (
        "1 exited normally; 1 by an exception (OSError): node-a pid 1 rank 1; 1 was killed or still runs: node-a pid 2"
    )
    assert said in out
    found = json.loads(report([line(0), line(1, ended="exception OSError")], "--json")[1])
    assert found["by_exception"] == [{"host": "node-a", "pid": 1, "rank": "1", "ended": "exception OSError"}]


def test_refusals_for_different_reasons_are_told_apart(report):
    _, out, _ = report([line(0, "refused", reason="one"), line(1, "refused", reason="two")])
    assert "refused in 1 (node-a pid 0 rank 0): one" in out
    assert "refused in 1 (node-a pid 1 rank 1): two" in out


def test_a_reason_alone_is_no_difference(report):
    """It may hold counts of what the patch has done."""
    assert report([line(pid, reason=f"observed: calls: {pid}") for pid in range(3)])[0] == 0


@pytest.mark.parametrize("other", ["pending", "absent"])
def test_a_process_that_never_imported_the_framework_does_not_differ(report, other):
    status, out, _ = report([line(0), line(1), line(2, other)])
    assert status == 0
    assert "a-bug  applied in 2, not imported in 1" in out
    status, out, _ = report([line(0, other), line(1, other)])
    assert (status, "1 patch for modules that no process imported" in out) == (0, True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": "2.0"}, "dist differs: 1.0 in 3 processes, but 2.0 in node-a pid 9 rank 9"),
        ({"python": "3.12.1"}, "Python differs: 3.11.7 in 3 processes, but 3.12.1 in"),
        ({"rlhf_patches": "0.2.0"}, "rlhf-patches differs: 0.1.0 in 3 processes, but 0.2.0 in"),
        ({"plugin_failures": [{"plugin": "plug", "reason": "broken"}]}, "plugin plug: broken (node-a pid 9"),
    ],
)
def test_versions_and_plugins(report, change, said):
    status, out, _ = report([*(line(pid) for pid in range(3)), line(9, **change)])
    assert status == 1
    assert said in out


def test_an_environment_without_the_framework_has_no_version_to_differ(report):
    assert report([line(0), line(1, "absent", version=None)])[0] == 0


def test_a_newer_release_that_nobody_has_read(report):
    row = {**line(0)["patches"][0], "status": "unaffected", "unreviewed": True, "reason": "It is not reviewed"}
    status, out, _ = report([line(0, patches=[row])])
    assert (status, "a-bug unreviewed in 1 (node-a pid 0 rank 0): It is not reviewed" in out) == (1, True)


def test_killed_processes_are_counted_and_no_problem(report):
    """Ray and torchrun kill their workers, and a run may go on."""
    status, out, _ = report([line(0), line(1, ended=None)])
    assert status == 0
    assert "1 exited normally; 1 was killed or still runs: node-a pid 1 rank 1" in out


def test_ranks_that_left_no_line(report):
    status, out, _ = report([line(pid, world=8) for pid in (0, 1, 5, 7)])
    assert (status, "no line from ranks 2-4, 6 of 8" in out) == (1, True)
    status, out, _ = report([line(0, world=2), line(0, world=1, process="2-0-99")])
    assert "no line from rank 1 of 2" in out
    assert report([line(0, world="many"), line(1, world="-1"), line(2, world="\u0663")])[0] == 0, "no number"


def test_the_last_line_of_a_process_counts(report):
    """It outgrew its first, or became another program; a pid that comes back is another process."""
    lines = [line(0, "refused"), line(0), line(0, process="1-0-100")]
    status, out, _ = report(lines)
    assert (status, "a-bug  applied in 2" in out) == (0, True)


def test_damaged_lines_are_counted_and_the_rest_is_read(report):
    torn = json.dumps(line(3))[:200]
    damaged = [torn, "[]", "{}", '{"host": 1}', json.dumps(line(4, patches=[3])), "\0\0\0", "null", "\ud7ff" * 3]
    status, out, _ = report([line(0), *damaged, "", "   ", line(1)])
    assert status == 1
    assert "2 processes" in out
    assert out.count("unreadable: line") == len(damaged)
    assert f"unreadable: line 2 of {out.split(' of ', 1)[1].split(' ')[0]} (200 bytes)" in out


def test_a_file_that_ends_in_the_middle_of_a_line(tmp_path, capsys):
    whole, file = json.dumps(line(0)), tmp_path / "run.jsonl"
    file.write_text(f"{whole}\n{json.dumps(line(1))[:50]}")
    assert cli.main(["report", str(file)]) == 1
    assert "unreadable: line 2" in capsys.readouterr().out
    file.write_text(whole)
    assert cli.main(["report", str(file)]) == 0


def test_lines_of_earlier_versions(report):
    """They had no process, no versions and no end."""
    old = {key: line(0)[key] for key in ("host", "pid", "rank", "python", "patches", "plugin_failures")}
    status, out, _ = report([old])
    assert (status, "a-bug  applied in 1" in out) == (0, True)


def test_several_files(tmp_path, capsys):
    """One for each host, where they share no disk."""
    files = []
    for pid, host in enumerate(("node-a", "node-b")):
        files.append(tmp_path / f"{host}.jsonl")
        files[-1].write_text(json.dumps(line(pid, host=host, world=2)) + "\n")
    assert cli.main(["report", str(files[0])]) == 1
    assert "no line from rank 1 of 2" in capsys.readouterr().out
    assert cli.main(["report", *map(str, files)]) == 0
    assert "2 processes: 1 on node-a, 1 on node-b" in capsys.readouterr().out


def test_json(report):
    lines = [*(line(pid, world=4) for pid in range(2)), line(2, "refused", reason="why", world=4, ended=None), "torn"]
    status, out, err = report(lines, "--json")
    found = json.loads(out)
    assert (status, err) == (1, "")
    assert (found["same"], found["processes"], found["hosts"]) == (False, 3, {"node-a": 3})
    assert found["not_ended"] == [{"host": "node-a", "pid": 2, "rank": "2"}]
    assert found["missing_ranks"] == {"4": [3]}
    (patch,) = found["patches"]
    assert (patch["name"], patch["differs"], patch["not_imported"]) == ("a-bug", True, 0)
    assert [(group["what"], len(group["processes"])) for group in patch["groups"]] == [("applied", 2), ("refused", 1)]
    assert patch["groups"][1]["reason"] == "why"
    assert len(found["unreadable"]) == 1
    assert len(found["problems"]) == 4
    assert json.loads(report(lines[:1], "--json")[1])["same"] is False
    assert json.loads(report([line(0)], "--json")[1])["same"] is True


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot read"),
        ("", "is empty: no process of the run has imported a framework"),
        (" \n \n", "is empty"),
        ("loss 4.1\nloss 3.9\n", "has no line of RLHF_PATCHES_REPORT"),
        ('{"loss": 4.1}\n', "has no line of"),
        (b"\x89PNG\xff\xfe\n", "has no line of"),
        ("folder", "Is a directory"),
    ],
)
def test_files_that_are_no_reports(tmp_path, capsys, content, said):
    file = tmp_path / "run.jsonl"
    if content == "folder":
        file.mkdir()
    elif content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    good = tmp_path / "good.jsonl"
    good.write_text(json.dumps(line(0)))
    assert cli.main(["report", str(good), str(file)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err
    assert str(file) in err


def test_text_from_a_file_cannot_move_the_cursor(report):
    _, out, _ = report([line(0, "refused", host="\x1b[2Jnode", reason="a\x1b[31m\nb")])
    assert "\x1b" not in out


def test_a_reason_prints_no_lines_of_its_own(report):
    reason = "a\nNo differences, nothing refused or failed.\r\x85\u2028b \x1b]0;title\x07\u202e[/red] :smile:"
    failures = [{"plugin": "plug\n- x", "reason": reason}]
    forged = line(0, "refused", host="node\nx", reason=reason, version="1\n0", plugin_failures=failures)
    status, out, _ = report([forged, line(1, rank="1\n2", started="yesterday\nx", python="3\n4", ended=None)])
    assert status == 1
    assert all(text.isprintable() for text in out.split("\n"))
    assert [text for text in out.splitlines() if text.startswith(("No diff", "x", "-"))] == [
        text for text in out.splitlines() if text.startswith(("- a-bug", "- dist", "- Python", "- plugin plug - x:"))
    ]
    status, out, err = report([forged], "--quiet")
    assert (status, out) == (1, "")
    assert all(text.startswith("rlhf-patches: ") for text in err.splitlines())
    assert "[/red] :smile:" in err


def test_who_brings_a_patch(report):
    rows = line(0)["patches"]
    theirs = [{**rows[0], "name": "their-bug", "plugin": "their-plugin", "status": "refused", "reason": "why"}]
    status, out, _ = report([line(0, patches=rows + theirs), line(1, patches=rows + theirs)])
    assert status == 1
    assert "\na-bug                            applied in 2\n" in out
    assert "\ntheir-bug (plugin their-plugin)  refused in 2\n" in out
    assert "- their-bug (plugin their-plugin) refused in 2 (" in out
    found = json.loads(report([line(0, patches=rows + theirs)], "--json")[1])
    assert [patch["plugins"] for patch in found["patches"]] == [[], ["their-plugin"]]


@pytest.mark.parametrize("size", [10**12, 10**18 - 1])
def test_worlds_that_nobody_can_mean_cost_no_memory(report, size):
    lines = [line(0, world=size), line(2, world=size), line(7, world=10**30), line(5, world="9" * 5000)]
    with _memory(100):
        status, out, _ = report(lines)
    assert (status, f"- no line from ranks 1, 3-{size - 1} of {size}\n" in out) == (1, True)
    found = json.loads(report(lines, "--json")[1])
    assert found["missing_ranks"][str(size)][:3] == [1, 3, 4]
    assert len(found["missing_ranks"][str(size)]) == 100_000
    _, out, _ = report([line(2 * pid, world=1000) for pid in range(300)])
    assert "no line from ranks 1, 3, 5, " in out
    assert ", 99 and 250 more such of 1000\n" in out


@contextlib.contextmanager
def _memory(megabytes):
    """So much more than what this process has now; beyond it is a MemoryError."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    old = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + (megabytes << 20), old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)


@pytest.mark.parametrize(
    "hostile",
    [
        json.dumps(line(0)).replace('"pid": 0', '"pid": 1e999'),
        json.dumps(line(0)).replace('"pid": 0', '"pid": NaN'),
        json.dumps(line(0)).replace('"pid": 0', '"pid": ' + "9" * 5000),
        json.dumps(line(0)).replace('"pid": 0', '"pid": ' + "9" * 900_000),
        json.dumps(line(True)).replace('"pid": 1', '"pid": true'),
        json.dumps(line(0, observations=1)).replace('"observations": 1', '"observations": ' + "[" * 100_000),
        json.dumps(line(0, host={"a": 1})),
        json.dumps(line(0, rank=["0"])),
        json.dumps(line(0, versions=[1])),
        json.dumps(line(0, plugin_failures=[1])),
        json.dumps(line(0, plugin_failures="x")),
        json.dumps(line(0, patches={"a": 1})),
        json.dumps(watched(0, [1])),
        json.dumps(watched(0, 1, values="2")),
        json.dumps(watched(0, 1)).replace('"worst"', '"best"'),
        json.dumps(line(0)).ljust(1 << 20) + "x",
        "x" * (3 << 20),
    ],
    ids=lambda hostile: hostile[:60] + str(len(hostile)),
)
def test_a_hostile_line_is_unreadable_and_the_next_is_read(report, hostile):
    status, out, err = report([line(8), hostile, line(9)])
    assert (status, err) == (1, "")
    assert "2 processes on node-a;" in out
    assert out.count("unreadable: line 2 of") == out.count("unreadable") == 1


def test_random_lines(report):
    """What is valid, with values in wrong places: no exception, and every line of the answer is ours."""
    chance = random.Random(22)
    odd = [
        None,
        True,
        -1,
        0.5,
        10**19,
        float("inf"),
        float("nan"),
        "",
        *["a\nFORGED"] * 5,
        "\x1b[2J",
        "9" * 5000,
        "\ud800",
        [],
        {},
    ]
    odd += [
        [[]],
        {"a": {"b": []}},
        "applied",
        "refused",
        "unreviewed",
        "x" * 5000,
        "rlhf-patches",
        "[/b]",
        "\0",
        "\u0663",
    ]

    def spoilt(value):
        if chance.random() < 0.03:
            return chance.choice(odd)
        if isinstance(value, dict):
            return {chance.choice([k] * 100 + ["\n", "x"]): spoilt(v) for k, v in value.items()}
        return [spoilt(each) for each in value] if isinstance(value, list) else value

    read = 0
    for _ in range(150):
        lines = [line(1)]
        for number in range(chance.randrange(12)):
            text = json.dumps(spoilt(line(number, chance.choice(["applied", "refused"]), world=8, ended=None)))
            if chance.random() < 0.1:
                place = chance.randrange(len(text))
                text = text[:place] + chance.choice(['"', "{", "]", "9" * 30, "\0", ""]) + text[place + 1 :]
            lines.append(text)
        status, out, err = report(lines, *chance.choice([[], ["--json"], ["--quiet"]]))
        assert status in (0, 1), err
        assert all(each.isprintable() and not each.startswith("FORGED") for each in (out + err).split("\n"))
        read += int(out.partition(" process")[0]) if "process" in out.partition("\n")[0] else 0
    assert read > 150, "not all of it is unreadable"


def _a_pipe(file):
    os.mkfifo(file)


def _a_device(file):
    file.symlink_to("/dev/zero")


def _a_sparse_file(file):
    file.touch()
    os.truncate(file, 1 << 40)


@pytest.mark.parametrize(
    ("make", "said"),
    [(_a_pipe, "a pipe or a device"), (_a_device, "a pipe or a device"), (_a_sparse_file, "more than 1024 MiB")],
)
def test_files_that_never_end(tmp_path, capsys, make, said):
    file = tmp_path / "run\x1b[2J.jsonl"
    make(file)
    with _memory(100):
        assert cli.main(["report", str(file)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), said in err, "\x1b" in err) == ("", 1, True, False)


def test_a_file_of_zeros_is_read_in_pieces(tmp_path, capsys):
    file = tmp_path / "run.jsonl"
    file.touch()
    os.truncate(file, 200 << 20)
    with _memory(100):
        assert cli.main(["report", str(file)]) == 2
    assert "has no line of" in capsys.readouterr().err


def test_limits_on_what_a_run_can_say(report, monkeypatch):
    rows = [{**line(0)["patches"][0], "name": f"bug-{n}", "status": "refused", "reason": str(n)} for n in range(50)]
    assert report([line(pid, patches=rows) for pid in range(9)])[0] == 1
    with monkeypatch.context() as patched:
        patched.setattr(report_reader, "_MOST_ENTRIES", 400)
        status, out, err = report([line(pid, patches=rows) for pid in range(9)])
        assert (status, out, "is too large" in err) == (2, "", True)
        patched.undo()
        patched.setattr(report_reader, "_MOST_DISTINCT", 100)
        assert report([line(pid, patches=rows) for pid in range(9)])[0] == 2
    monkeypatch.setattr(report_summary, "_MOST_PROBLEMS", 20)
    monkeypatch.setattr(report_reader, "_MOST_UNREADABLE", 5)
    _, _, err = report([line(0, patches=rows)], "--quiet")
    assert (err.count("\n"), err.splitlines()[-1]) == (21, "rlhf-patches: and more")
    _, _, err = report([line(0), *["torn"] * 8], "--quiet")
    assert (err.count("unreadable"), err.splitlines()[-1]) == (6, "rlhf-patches: unreadable: 3 more lines")


def test_a_thousand_processes(report):
    """Real lines have twenty patches; five of these processes differ, each in its own way."""
    rows = [{**line(0)["patches"][0], "name": f"bug-{number}"} for number in range(20)]
    lines = [line(pid, host=f"node-{pid // 8}", world=1000, patches=rows) for pid in range(1000)]
    for odd in range(5):
        changed = [{**row, "status": "refused", "reason": "odd"} if n == odd else row for n, row in enumerate(rows)]
        lines[200 * odd]["patches"] = changed
    status, out, _ = report(lines, padding=4000)
    assert status == 1
    assert out.startswith("1000 processes: 8 on node-0, 8 on node-1, ")
    assert "and 117 more hosts" in out
    for odd in range(5):
        assert (
            f"bug-{odd} differs: applied in 999 processes, but refused in node-{25 * odd} pid {200 * odd} rank" in out
        )
    assert max(map(len, out.splitlines())) < 400
