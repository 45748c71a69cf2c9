"""A tokenizer of as many words as the tiny models have tokens, and texts that it makes the given tokens of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hunt.hf_trainer import PAD, VOCABULARY

END = 1
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} "
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }} <eos> {% endgeneration %}"
    "{% else %}{{ message['content'] }} <eos> {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)


def tokenizer() -> Any:
    """Token ``n`` is the word ``wn``, but for padding, the end, what is unknown, and a chat's two roles."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [f"w{token}" for token in range(VOCABULARY)]
    words[PAD], words[END], words[2] = "<pad>", "<eos>", "<unk>"
    words[-2:] = ["user", "assistant"]
    plain = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, unk_token="<unk>"))
    # Which GOLD asks for; it changes no ASCII.
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), bytes_])
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=TEMPLATE
    )


def text(tokens: Sequence[int]) -> str:
    """Words of these tokens; of the two roles' tokens, which a chat has of its own, others are taken."""
    return " ".join(f"w{plain(token)}" for token in tokens)


def plain(token: int) -> int:
    """A token that is a word."""
    return token if token < VOCABULARY - 2 else token - 8
