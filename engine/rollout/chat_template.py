"""Token-exact turns: the chat template is rendered piecewise, and an audit checks that the pieces make the whole.

Invariants
- A trajectory is prompt ids + sampled ids + tool ids + sampled ids ...; nothing sampled is ever tokenised again.
- The text of that sequence is what the template renders for the whole conversation at once (audited at start).
- A sampled turn ends with the end-of-turn token, or the rollout adds it where an engine ended the turn at another one;
  tool ids begin with what the template puts after it (the newline).
- What a tool printed is text: the name of a control token in it is spelled out and never becomes that token.
- System message, tools, template, its arguments and its date are the same in every rendering, the audit's included, so
  the ids of a conversation are the same on any day.

There is one exception. A template may begin a turn to be generated with a prefill (an empty thought, say) and leave it
out when it renders that turn as history. A rollout keeps the prefill, since the model read it.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from tokenizers.decoders import DecodeStream

from engine.rollout.tool_call_messages import check_template_keeps_calls, normalize

Message = Mapping[str, Any]

THOUGHT = ("<think>", "</think>")
Thoughts = Literal["none", "possible", "begun"]
_TOOL = "\x00tool{}\x00"  # stands for a tool response when the template is cut into pieces
_CALLER = "\x00caller\x00"  # stands for the assistant's turn before it
_MARK = "\ue000{}\ue001"  # the name of a control token in a tool's response, by its number
_MARKS = re.compile("\ue000([0-9]{1,6})\ue001")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # how tokenizers with byte fallback name a byte
# How byte-level tokenizers write bytes in the names of tokens: those that can be read as they are, others above 255.
_READABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTE_OF = {chr(byte): byte for byte in _READABLE} | {
    chr(256 + number): byte for number, byte in enumerate(byte for byte in range(256) if byte not in _READABLE)
}
_PROBES = ["42", "", "  two  spaces ", "line\nline\n", "<b>&\"'{{x}}</b>"]


class TemplateError(ValueError):
    """The chat template or its tokenizer cannot be used turn by turn. The message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatConfig:
    """How conversations are rendered; by default with the checkpoint's own template.

    >>> ChatConfig(system="Think first.", template_arguments={"enable_thinking": False}).template_arguments
    {'enable_thinking': False}
    """

    system: str | None = None
    """A system message for conversations that have none of their own."""
    tools: tuple[Mapping[str, Any], ...] | None = None
    """JSON schemas that the template shows (`engine.tools.python_tool.schema`). None: those of the tools that can
    be called; (): none, because the system message describes them.
    """
    template: str | Path | None = None
    """A Jinja template, or the path of one, in place of the checkpoint's."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template, such as enable_thinking=False."""
    date: str = "2025-01-01"
    """What templates get as today's date (`strftime_now`), so that ids do not change with the calendar."""

    def template_text(self) -> str | None:
        """Returns the text of `template`. Raises TemplateError if its file cannot be read."""
        if self.template is None or (isinstance(self.template, str) and "{" in self.template):
            return self.template
        try:
            return Path(self.template).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise TemplateError(f"template {str(self.template)!r} cannot be read: {error}") from error


class ChatTemplate:
    """Renders prompts and tool responses to token ids with a Hugging Face tokenizer's chat template.

    template: the text of the configured template; None for the tokenizer's own. prefill: the text with which the
    template begins a turn to be generated; the model continues after it.
    """

    def __init__(self, tokenizer: Any, config: ChatConfig | None = None) -> None:
        self.config = config = config or ChatConfig()
        self.template = config.template_text()
        if not tokenizer.chat_template and self.template is None:
            raise TemplateError("the tokenizer has no chat template (chat_template in tokenizer_config.json)")
        if tokenizer.eos_token_id is None:
            raise TemplateError("the tokenizer has no end-of-turn token (eos_token in tokenizer_config.json)")
        self._tokenizer = tokenizer
        self._tools = [dict(tool) for tool in config.tools or ()] or None
        self._check_config()
        self._day = _day(config.date)
        self._fast = tokenizer.backend_tokenizer
        self.end_of_turn: int = tokenizer.eos_token_id
        self.end_of_turn_text: str = tokenizer.eos_token
        self._cache_renderings()
        self._names = sorted((token.content for token in self._fast.get_added_tokens_decoder().values()), key=len)
        self._control = re.compile(f"({'|'.join(map(re.escape, reversed(self._names)))})")
        self._spelled = functools.cache(self._spell)
        self.prefill = self._find_prefill()
        self._dropped = ""  # the part of the prefill that the template leaves out of the history: all or nothing
        self.audit()

    @classmethod
    def load(cls, checkpoint: str | Path, config: ChatConfig | None = None) -> ChatTemplate:
        """Loads a checkpoint's tokenizer. Raises TemplateError if it has none, or if its template is unusable."""
        from transformers import AutoTokenizer

        if not (Path(checkpoint) / "tokenizer_config.json").is_file():
            raise TemplateError(f"checkpoint {str(checkpoint)!r}: no tokenizer_config.json there")
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(checkpoint), trust_remote_code=False)
        except ValueError as error:  # for example, it needs code of the checkpoint's own
            raise TemplateError(f"checkpoint {str(checkpoint)!r}: its tokenizer cannot be loaded: {error}") from error
        return cls(tokenizer, config)

    @property
    def tokenizer_json(self) -> str:
        """The tokenizer as the `tokenizers` package writes it to a file."""
        return str(self._fast.to_str())

    def with_tools(self, schemas: Sequence[Mapping[str, Any]]) -> ChatTemplate:
        """Returns a chat that shows these tools, or this one if the configuration fixes the tools or the template
        cannot show any.

        Raises TemplateError if the template is unusable with the tools.
        """
        if self.config.tools is not None or not schemas or not self._mentions("tools"):
            return self
        return ChatTemplate(self._tokenizer, replace(self.config, tools=tuple(schemas)))

    def showing(self, schemas: Sequence[Mapping[str, Any]]) -> ChatTemplate:
        """Returns the same chat with other tools, for data in which each conversation has tools of its own.

        The result is not audited, which would take longer than rendering a conversation; `conversation` compares what
        it renders. Raises TemplateError if the template cannot show tools.
        """
        other = copy.copy(self)
        other.config = replace(self.config, tools=tuple(schemas))
        other._tools = [dict(tool) for tool in schemas] or None
        other._check_config()
        other._cache_renderings()
        return other

    def _cache_renderings(self) -> None:
        """Makes new caches: the samples of a group ask for the same prompt, and often for the same response."""
        self._tool_pieces = functools.cache(self._split_around_tools)
        self._prompt = functools.lru_cache(1024)(self._encode_prompt)
        self._tool_response_ids = functools.lru_cache(1024)(self._encode_tool_responses)

    def _check_config(self) -> None:
        """Raises TemplateError for settings that the template would silently ignore."""
        if self.config.tools and not self._mentions("tools"):
            raise TemplateError("tools: the chat template shows none. Fix: describe them in the system message")
        for name in self.config.template_arguments:
            if not self._mentions(name):
                raise TemplateError(f"template_arguments: the chat template has no variable {name!r}")

    def _mentions(self, name: str) -> bool:
        template = self._tokenizer.get_chat_template(self.template, [{}] if name == "tools" else self._tools)
        return re.search(rf"\b{re.escape(name)}\b", template) is not None

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Returns the ids of the rendered messages, ending with the opening of the assistant's turn."""
        if any(self._prints_control(message) for message in messages):
            return self._encode_marked(self._render([self._marked(message) for message in messages], generate=True))
        try:
            return list(self._prompt(tuple(tuple(message.items()) for message in messages)))
        except TypeError:  # messages with calls cannot be hashed, so they are not cached
            return self._encode(self._render(messages, generate=True))

    def tool_ids(self, responses: Sequence[str]) -> list[int]:
        """Returns the ids from after the end-of-turn token of the calling turn to the opening of the next turn.

        The text is encoded as a whole, except that the name of a control token in a response is encoded by itself.
        """
        return list(self._tool_response_ids(tuple(responses)))

    @property
    def kept_prefill(self) -> str:
        """The part of the prefill that the template keeps when it renders the turn as history."""
        return self.prefill.removesuffix(self._dropped)

    def ids_after_turn(self, messages: Sequence[Message], sampled: str, new: Sequence[Message]) -> list[int]:
        """Returns the ids from after the end-of-turn token of a sampled turn to the opening of the next one.

        messages: those before the turn. sampled: the turn's text, without the prefill. new: the messages after it.
        Raises TemplateError if the new messages change how the template renders what is before them.
        """
        if all(message["role"] == "tool" for message in new):
            return self.tool_ids([message["content"] for message in new])
        turn: Message = {"role": "assistant", "content": self.kept_prefill + sampled}
        rendered = self._render(messages, generate=True).removesuffix(self._dropped) + sampled + self.end_of_turn_text
        whole = self._render([*messages, turn, *map(self._marked, new)], generate=True)
        _compare(rendered, whole[: len(rendered)])
        encode = self._encode_marked if any(map(self._prints_control, new)) else self._encode
        return encode(whole[len(rendered) :])

    def conversation(self, messages: Sequence[Message]) -> list[tuple[list[int], bool]]:
        """Returns the ids of a conversation in pieces, each with whether it is an assistant's turn, up to the last such
        turn.

        A rollout in which the model writes these turns records the same ids. Calls may stand in the text of a turn, or
        as data in the field `tool_calls`, which the template renders. Raises TemplateError if the template changes
        earlier turns; ValueError if a message cannot be rendered, there is no assistant's turn, or one continues after
        its end-of-turn token.
        """
        messages = normalize(messages)
        pieces: list[tuple[list[int], bool]] = []
        rendered, covered = "", 0  # the text of the pieces, and how many messages they cover
        for at, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            whole = self._render(messages[:at], generate=True)
            _compare(rendered, whole[: len(rendered)])
            given = messages[covered:at]
            if covered and all(each["role"] == "tool" for each in given):
                ids = self.tool_ids([each["content"] for each in given])
            else:
                ids = self._encode(whole[len(rendered) :])
            text = self._after_prefill(at, message["content"])
            if "tool_calls" in message:
                text = self._turn_text(messages[: at + 1], whole, text)
            turn = self._encode(text)
            if self.end_of_turn in turn:
                raise ValueError(f"message {at}: the assistant's turn holds the end-of-turn token in its text")
            pieces += [(ids, False), ([*turn, self.end_of_turn], True)]
            rendered = whole.removesuffix(self._dropped) + text + self.end_of_turn_text
            covered = at + 1
        if not pieces:
            raise ValueError(f"no assistant's turn in a conversation of {[each['role'] for each in messages]}")
        return pieces

    def _after_prefill(self, at: int, content: str) -> str:
        """Returns what the model writes of a turn with this content. Raises ValueError if the prefill is missing."""
        if not content.startswith(self.prefill) and not self._dropped:
            raise ValueError(f"message {at}: the template begins each turn with {self.prefill!r}, got {content[:80]!r}")
        return content.removeprefix(self.prefill)

    def _turn_text(self, messages: Sequence[Message], opened: str, content: str) -> str:
        """Returns the text that the template puts after `opened` for the last message, a turn with tool calls.

        content: the message's, without the prefill.
        """
        whole = self._render(messages, generate=False)
        opened = _opened(opened, whole, self._dropped)
        _compare(opened, whole[: len(opened)])
        text, _, _ = whole[len(opened) :].rpartition(self.end_of_turn_text)
        check_template_keeps_calls(text, [*messages[:-1], {**messages[-1], "content": content}])
        return text

    def _encode_tool_responses(self, responses: tuple[str, ...]) -> list[int]:
        if not any(map(self._control.search, responses)):
            return self._encode(self._tool_text(responses))
        text, *pieces = self._tool_pieces(len(responses))
        ids: list[int] = []
        for response, piece in zip(responses, pieces, strict=True):
            before, *rest = self._control.split(response)
            text += before
            for name, after in zip(rest[::2], rest[1::2], strict=True):
                ids += self._encode(text) + self._spelled(name)
                text = after
            text += piece
        return ids + self._encode(text)

    def _prints_control(self, message: Message) -> bool:
        """Returns whether a message is a tool's and has the name of a control token in its text."""
        return message["role"] == "tool" and bool(self._control.search(str(message["content"])))

    def _marked(self, message: Message) -> Message:
        """Returns a message with marks in place of the names of control tokens that a tool has printed."""
        if not self._prints_control(message):
            return message
        name_of = {name: _MARK.format(number) for number, name in enumerate(self._names)}
        return {**message, "content": self._control.sub(lambda found: name_of[found[0]], message["content"])}

    def _encode_marked(self, text: str) -> list[int]:
        """Returns the ids of a rendered text, in which the names that marks stand for are spelled out."""
        before, *rest = _MARKS.split(text)
        ids: list[int] = []
        for number, after in zip(rest[::2], rest[1::2], strict=True):
            is_name = int(number) < len(self._names)  # otherwise a tool has printed the mark itself
            ids += self._encode(before)
            ids += self._spelled(self._names[int(number)]) if is_name else self._encode(_MARK.format(number))
            before = after
        return ids + (self._encode(before) if before or not ids else [])

    def tokens_completing(self, tag: str) -> frozenset[int]:
        """Returns the ids of the tokens that can complete `tag`; no other token has text in which it ends."""
        ids = sorted(self._fast.get_vocab(with_added_tokens=True).values())
        texts = self._fast.decode_batch([[token] for token in ids], skip_special_tokens=False)
        last = tag[-1]

        def completes(text: str) -> bool:
            heads = (text[: at + 1] for at, char in enumerate(text) if char == last)
            return any(head.endswith(tag) or tag.endswith(head) for head in heads)

        return frozenset(token for token, text in zip(ids, texts, strict=True) if last in text and completes(text))

    @functools.cached_property
    def thoughts(self) -> Thoughts:
        """Whether a turn may begin with a thought in <think> tags, or has one begun in its prefill. "none" where the
        template knows none, or the prefill has a whole one.
        """
        begin, end = THOUGHT
        if begin in self.prefill:
            return "none" if end in self.prefill.rpartition(begin)[2] else "begun"
        known = begin in self._tokenizer.get_chat_template(self.template, self._tools)
        return "possible" if known else "none"

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a plain text, with what the tokenizer adds around it (a beginning-of-text token, say)."""
        return list(self._fast.encode(text).ids)

    @functools.cached_property
    def vocabulary(self) -> int:
        """Returns how many tokens the tokenizer knows."""
        return self._fast.get_vocab_size(with_added_tokens=True)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._fast.decode(list(token_ids), skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of one token, which may be part of a character."""
        text = self.decode([token_id])
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return text.encode()
        name = self._fast.id_to_token(token_id) or ""
        if fallback := _BYTE.fullmatch(name):
            return bytes([int(fallback[1], 16)])
        if all(character in _BYTE_OF for character in name):
            return bytes(_BYTE_OF[character] for character in name)
        return text.encode()

    def stream(self) -> TextStream:
        """Returns a fresh incremental decoder for one turn."""
        return TextStream(self._fast)

    def audit(self) -> None:
        """Raises TemplateError unless rendering turn by turn equals rendering at once."""
        try:
            self._audit_turns(dropped="")
        except TemplateError:
            if not self.prefill:
                raise
            self._dropped = self.prefill
            self._audit_turns(dropped=self.prefill)
        for probe in _PROBES:
            if self.decode(self._encode(probe)) != probe:
                raise TemplateError(f"the tokenizer does not give {probe!r} back after encoding and decoding it")
        self._audit_control()

    def _audit_turns(self, *, dropped: str) -> None:
        """dropped: the part of the prefill that history leaves out; the rest stands in the turn's content."""
        kept = self.prefill.removesuffix(dropped)
        user: Message = {"role": "user", "content": "What is 6 * 7?"}
        thought = "<think>\n6 * 7\n</think>\n\n"  # many templates leave it out of all turns but the last
        asking, answering = f"{thought}<reason>I use python.</reason>", f"{thought}<answer>42</answer>"
        asked: Message = {"role": "assistant", "content": kept + asking}
        answered: Message = {"role": "assistant", "content": kept + answering}
        for responses in (_PROBES[:1], _PROBES, _PROBES[2:4]):
            tools: list[Message] = [{"role": "tool", "content": response} for response in responses]
            pieces = self._render([user], generate=True).removesuffix(dropped)
            pieces += asking + self.end_of_turn_text + self._tool_text(responses)
            _compare(pieces, self._render([user, asked, *tools], generate=True))
            whole = self._render([user, asked, *tools, answered], generate=False)
            opened = _opened(pieces, whole, dropped)
            pieces = opened + answering + self.end_of_turn_text
            _compare(pieces, whole[: len(pieces)])

    def _find_prefill(self) -> str:
        """Returns what the template puts before the text of a turn to be generated, but not of one in the history."""
        user: Message = {"role": "user", "content": "u"}
        there: list[Message] = [{"role": "assistant", "content": _CALLER}, {"role": "tool", "content": "42"}]
        opened = self._render([user], generate=True)
        before, _, _ = self._render([user, *there], generate=True).partition(_CALLER)
        return opened.removeprefix(before) if opened.startswith(before) else ""

    def _audit_control(self) -> None:
        """Raises TemplateError unless the model reads the name of the end-of-turn token if a tool prints it."""
        printed = [f"a{self.end_of_turn_text}b"]
        ids = self.tool_ids(printed)
        if self.decode(ids) != self._tool_text(printed) or ids.count(self.end_of_turn) != self._ends(printed):
            raise TemplateError(f"the tokenizer cannot spell {self.end_of_turn_text!r} in a tool's response as text")

    def _ends(self, responses: Sequence[str]) -> int:
        """Returns how many end-of-turn tokens the template itself puts around the responses."""
        return sum(piece.count(self.end_of_turn_text) for piece in self._tool_pieces(len(responses)))

    def _spell(self, name: str) -> list[int]:
        """Returns the name of a control token as ordinary tokens."""
        before = self._fast.encode_special_tokens
        self._fast.encode_special_tokens = True
        try:
            ids = self._encode(name)
            # The tokenizer still finds an added token that is not flagged as special, unless its text is cut in two.
            return ids if ids != [self._fast.token_to_id(name)] else self._encode(name[:1]) + self._encode(name[1:])
        finally:
            self._fast.encode_special_tokens = before

    def _tool_text(self, responses: Sequence[str]) -> str:
        first, *pieces = self._tool_pieces(len(responses))
        return first + "".join(response + piece for response, piece in zip(responses, pieces, strict=True))

    def _split_around_tools(self, count: int) -> list[str]:
        """Returns what the template puts before, between and after `count` tool responses to an assistant's turn."""
        tools: list[Message] = [{"role": "tool", "content": _TOOL.format(n)} for n in range(count)]
        head: list[Message] = [{"role": "user", "content": "u"}, {"role": "assistant", "content": _CALLER}]
        rest = self._render([*head, *tools], generate=True)
        _, mark, rest = rest.partition(_CALLER + self.end_of_turn_text)
        if not mark:
            raise TemplateError(f"the template does not end an assistant turn with {self.end_of_turn_text!r}")
        pieces = []
        for n in range(count):
            piece, mark, rest = rest.partition(_TOOL.format(n))
            if not mark:
                raise TemplateError(self._why_no_response(head))
            pieces.append(piece)
        return [*pieces, rest]

    def _why_no_response(self, head: list[Message]) -> str:
        """Returns why the template's rendering lacks the text of a tool's response."""
        one, other = (
            self._render([*head, {"role": "tool", "content": text}], generate=True) for text in ("a\n1", "b\n2")
        )
        if one == other:
            return "the template does not render messages of role 'tool'"
        shown = one.partition(_CALLER)[2][:120]
        return (
            f"the template changes the text of a tool's response: 'a\\n1' becomes {shown!r}. Fix: use a template "
            "(ChatConfig.template) that keeps the content of messages of role 'tool', without tojson or trim"
        )

    def _render(self, messages: Sequence[Message], *, generate: bool) -> str:
        if self.config.system is not None and [message["role"] for message in messages[:1]] != ["system"]:
            messages = [{"role": "system", "content": self.config.system}, *messages]
        try:
            return self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=self._tools,
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=generate,
                strftime_now=self._day.strftime,
                **self.config.template_arguments,
            )
        except Exception as error:  # jinja2 raises whatever the template raises
            roles = [message["role"] for message in messages]
            raise TemplateError(f"the chat template fails on roles {roles}: {error}") from error

    def _encode_prompt(self, messages: tuple[tuple[tuple[str, str], ...], ...]) -> list[int]:
        return self._encode(self._render([dict(message) for message in messages], generate=True))

    def _encode(self, text: str) -> list[int]:
        return self._fast.encode(text, add_special_tokens=False).ids


class TextStream:
    """Decodes tokens as they come. Text comes out when its bytes are complete characters.

    No more text comes out after bytes that spoil characters which came out before: with byte fallback the tokenizer
    decodes a whole run of bytes anew.
    """

    def __init__(self, fast_tokenizer: Any) -> None:
        self._tokenizer = fast_tokenizer
        self._stream = DecodeStream(skip_special_tokens=False)

    def step(self, token_ids: Sequence[int]) -> str:
        try:
            return self._stream.step(self._tokenizer, list(token_ids)) or ""
        except Exception:  # a bare one of tokenizers, "Invalid prefix encountered", here and in all later steps
            return ""


def _day(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise TemplateError(f"date: must be a day such as 2025-01-01, got {text!r}") from None


def _opened(opened: str, whole: str, dropped: str) -> str:
    """Returns what comes before the text of the last turn, which may keep a prefill that earlier turns lose."""
    return opened if whole.startswith(opened) else opened.removesuffix(dropped)


def _compare(pieces: str, whole: str) -> None:
    """Raises TemplateError with the first difference of two renderings."""
    if pieces == whole:
        return
    at = next((n for n, (a, b) in enumerate(zip(pieces, whole, strict=False)) if a != b), min(len(pieces), len(whole)))
    raise TemplateError(
        "the chat template is not append-only: rendered turn by turn it differs from the whole conversation at "
        f"character {at}: {pieces[at : at + 40]!r} against {whole[at : at + 40]!r} (after "
        f"{whole[max(0, at - 40) : at]!r}). Fix: use a template that leaves earlier turns unchanged"
    )
