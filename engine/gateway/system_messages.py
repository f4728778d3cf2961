"""System messages of clients: which text is left out, and where the template takes the rest. Pure.

Agents send system messages anywhere; Claude Code does so in the middle of a conversation. Many templates take one only
at the beginning: after other messages they raise, leave it out, or move it to the front, which would change what was
rendered before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.rollout.chat_template import ChatTemplate, Message

BILLING = "x-anthropic-billing-header"
"""With this begins a text of Claude Code that differs from prompt to prompt: with it no two share a prefix."""
_EARLIER, _LATER = "alpha", "omega"  # in the messages by which a template is tried
BETWEEN = "\n\n"


def without_billing(texts: Iterable[str]) -> str:
    """Returns the texts of a system message as one, without the billing header.

    >>> without_billing(["x-anthropic-billing-header: cc_version=2; 57f", "You are helpful."])
    'You are helpful.'
    """
    return "".join(text for text in texts if not text.startswith(BILLING))


def is_billing(texts: Sequence[object]) -> bool:
    """Returns whether nothing but the billing header is in a system message, which is left out then.

    >>> is_billing(["x-anthropic-billing-header: cc_version=2; 57f"]), is_billing([""]), is_billing([])
    (True, False, False)
    """
    return bool(texts) and all(isinstance(text, str) and text.startswith(BILLING) for text in texts)


def shows_system_anywhere(chat: ChatTemplate) -> bool:
    """Returns whether the template shows a system message that comes after other messages, and shows it there."""
    earlier: list[Message] = [{"role": "user", "content": "u"}, {"role": "assistant", "content": _EARLIER}]
    later: list[Message] = [{"role": "system", "content": _LATER}, {"role": "user", "content": "u"}]
    try:
        shown = chat.decode(chat.prompt_ids([*earlier, *later]))
    except ValueError:  # TemplateError is one
        return False
    _, _, rest = shown.partition(_EARLIER)
    return _LATER in rest


def with_system_first(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages with a system message at the beginning only.

    Further ones that begin the conversation are joined to the first. A later one becomes the user's, joined to the
    user's messages beside it, since some templates demand that user and assistant take turns. What comes before a turn
    of the assistant stays as it is whatever follows that turn.
    """
    placed: list[Message] = []
    joins = False  # whether a message of the user is joined to the last one, which ends with a system text
    for message in messages:
        role, last = message.get("role"), placed[-1] if placed else None
        if role == "system" and last is not None:
            role = "system" if last.get("role") == "system" else "user"
            if last.get("role") == role:
                placed[-1] = _joined(last, message)
            else:
                placed.append({"role": role, "content": message.get("content")})
            joins = role == "user"
        elif joins and role == "user" and last is not None:
            placed[-1], joins = _joined(last, message), False
        else:
            placed.append(message)
            joins = False
    return placed


def _joined(first: Message, second: Message) -> Message:
    texts = (str(each.get("content") or "") for each in (first, second))
    return {**first, "content": BETWEEN.join(texts)}
