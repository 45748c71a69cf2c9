"""The file of a rehearsal's results: several engines, nodes, and processes that write at once."""

from __future__ import annotations

import json
import multiprocessing

import pytest

from rlhf_patches.rehearsal import start
from rlhf_patches.rehearsal.relation import Relation, Verdict
from rlhf_patches.rehearsal.results import write_results


def results(of, status=0, measured=""):
    return {"status": status, "relations": [{"of": of, "measured": measured}], "trained_on": []}


def write(path, of, **more):
    write_results(str(path), of, results(of, **more), {f"patch-of-{of}": " by 2"}, ["another"], first=True)


def write_many(path, number):
    for place in range(10):
        write(path, f"engine {number}-{place}", status=number % 2)


def test_engines_that_write_at_once_lose_nothing(tmp_path):
    path, context = tmp_path / "results.json", multiprocessing.get_context("fork")
    processes = [context.Process(target=write_many, args=(path, number)) for number in range(4)]
    for each in processes:
        each.start()
    for each in processes:
        each.join()
    found = json.loads(path.read_text())
    assert len(found["relations"]) == len(found["repaired"]) == 40
    assert (found["status"], found["ran"]) == (1, ["another"])


def test_rank_0_counts_wherever_it_writes_first_or_last(tmp_path):
    for order in ((False, True), (True, False)):
        path = tmp_path / f"{order[0]}.json"
        for first in order:
            more = results("actor", measured="of rank 0" if first else "of another")
            write_results(str(path), "actor", more, {}, [], first=first)
        assert [row["measured"] for row in json.loads(path.read_text())["relations"]] == ["of rank 0"]


RELATIONS = [Relation("micro-batch weights", Verdict.DEVIATES, "2", "twice as large")]


def published(monkeypatch, path, *, first, local_rank):
    monkeypatch.setenv("RLHF_PATCHES_REHEARSED", str(path))
    monkeypatch.setenv("RANK", "0" if first else "8")
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    return start._publish("Trainer", "first window", RELATIONS, None, first)


def test_a_node_without_rank_0_has_results_without_a_table(tmp_path, monkeypatch, capsys):
    path = tmp_path / "results.json"
    assert published(monkeypatch, path, first=False, local_rank="1") == 0
    assert not path.exists()
    assert published(monkeypatch, path, first=False, local_rank="0") == 0
    assert json.loads(path.read_text())["status"] == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("first", [True, False])
def test_a_worker_on_a_node_without_the_commands_folder_says_so(tmp_path, monkeypatch, capsys, first):
    assert published(monkeypatch, tmp_path / "other" / "results.json", first=first, local_rank="0") == 1
    said = capsys.readouterr().out
    assert ("twice as large" in said) == first
    assert "the command does not get these results" in said
