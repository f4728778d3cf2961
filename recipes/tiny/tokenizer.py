"""Trains the tiny agent's tokenizer: 512 byte-level tokens, and the chat template.

Promises
- Any text survives encoding and decoding unchanged.
- A digit is always a token of its own, and so is a line break; each tag of the agent's format is one token.
- The chat template is append-only, in text and in ids: rendering turn by turn equals rendering at once. (Replies to
  several calls of one turn share one user turn, so they are appended together.)

Merges may span words ("super" BPE): half as many tokens as with words kept apart, and learnt in less CPU time.
The tokenizer is trained once and shipped: one trained on another mix of demonstrations has other merges, with which a
checkpoint reads and writes word salad.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from recipes.tiny.task import Message

VOCABULARY = 512
PAD, TURN_START, TURN_END = "<|pad|>", "<|im_start|>", "<|im_end|>"
TAGS = tuple(f"<{slash}{name}>" for name in ("reason", "answer", "tool_call", "tool_response") for slash in ("", "/"))

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == "tool" -%}
{%- if loop.first or loop.previtem.role != "tool" -%}{{- "<|im_start|>user" -}}{%- endif -%}
{{- "\\n<tool_response>\\n" + message.content + "\\n</tool_response>" -}}
{%- if loop.last or loop.nextitem.role != "tool" -%}{{- "<|im_end|>\\n" -}}{%- endif -%}
{%- else -%}
{{- "<|im_start|>" + message.role + "\\n" + message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- "\\n" if message.content or not loop.first -}}
{{- '<tool_call>{"name": ' + call.function.name | tojson -}}
{{- ', "arguments": ' + call.function.arguments | tojson + "}</tool_call>" -}}
{%- endfor -%}
{{- "<|im_end|>\\n" -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}
"""


def train_tokenizer(conversations: Sequence[list[Message]], vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Learns the merges from demonstrations. Raises ValueError for too few of them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|\n"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(TAGS),
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(conversations), trainer)
    # Not special: the engine's parser and the reward read the tags in the decoded text.
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    if tokenizer.get_vocab_size() != vocabulary:
        raise ValueError(
            f"{len(conversations)} conversations gave {tokenizer.get_vocab_size()} tokens, not {vocabulary}"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=TURN_END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def _corpus(conversations: Iterable[list[Message]]) -> Iterator[str]:
    """Yields texts between the tags: no merge may contain a piece of a tag."""
    tags = re.compile("|".join(TAGS))
    for demonstration in conversations:
        yield from ("user\n", "assistant\n")
        for message in demonstration:
            yield from tags.split(message["content"])
