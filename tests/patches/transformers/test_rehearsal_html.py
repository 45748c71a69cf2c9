"""The page of what a run trains on: every token once, told apart by its use, and nothing of it is markup."""

from __future__ import annotations

from html.parser import HTMLParser

import torch

from rlhf_patches.rehearsal import html, labels
from rlhf_patches.rehearsal.relation import Relation, Verdict

WORDS = {1: "<script>alert(1)</script>", 2: "two\n", 3: 'a "quoted" &amp;', 9: "</s>"}


class Tokenizer:
    eos_token_id, bos_token_id = 9, None

    @staticmethod
    def decode(numbers):
        return "".join(WORDS.get(number, f"w{number}") for number in numbers)


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.tokens, self.text, self._kind = [], [], "", None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        given = dict(attributes)
        self._kind = given["class"] if tag == "span" and "title" in given else None

    def handle_endtag(self, tag):
        self._kind = None

    def handle_data(self, data):
        self.text += data
        if self._kind is not None:
            self.tokens.append((data, self._kind))


def found(**inputs):
    trained = labels.read({name: torch.tensor(value) for name, value in inputs.items()}, Tokenizer())
    relations = [Relation("per-row gradients", Verdict.DEVIATES, "0.5", "<b>worse</b>"), trained.relation()]
    return {
        "relations": [{"of": "Trainer", **each.as_json()} for each in relations],
        "trained_on": [{"of": "My<Trainer>", **trained.as_json()}],
    }


def test_each_token_is_told_apart_and_escaped():
    text = html.page(
        found(
            input_ids=[[1, 2, 3, 4, 5, 9, 0], [1, 2, 4, 4, 4, 4, 4]],
            labels=[[-100, -100, 3, -100, 5, 9, -100], [-100] * 7],
            attention_mask=[[1] * 6 + [0], [1] * 7],
        )
    )
    page = Page(text)
    assert page.tokens == [
        ("<script>alert(1)</script>", "prompt"),
        ("two↵\n", "prompt"),
        ('a "quoted" &amp;', "label"),
        ("w4", "between"),
        ("w5", "label"),
        ("</s>", "label"),
        ("w0", "padding"),
    ]
    assert not {"script", "b", "link", "img"} & set(page.tags)
    assert "http" not in text
    assert "23%" in page.text
    assert "rows without a label" in page.text
    assert "My<Trainer>" in page.text
    assert 'class="deviates"' in text


def test_a_long_row_is_cut_and_says_so():
    size = labels.SHOWN + 5
    page = Page(html.page(found(input_ids=[[4] * size], labels=[[4] * size])))
    assert len(page.tokens) == labels.SHOWN
    assert "5 more tokens" in page.text


def test_a_run_without_tokens_says_so():
    relations = [{"of": "loop", **Relation("gradient used", Verdict.HOLDS).as_json()}]
    page = Page(html.page({"relations": relations, "trained_on": []}))
    assert "no labels or completion masks" in page.text
    assert page.tokens == []
