"""The thought with which a turn begins, `<think>...</think>`, apart from the text after it. Pure.

Clients take a thought off, put it together anew, or keep it apart (in OpenAI's dialect as `reasoning_content`, in
Anthropic's as a block of type `thinking`). The template may open the thought at the end of the prompt; then the turn
has only the closing tag.
"""

from __future__ import annotations

from engine.gateway.overlap import overlap
from engine.rollout.chat_template import THOUGHT, ChatTemplate, Message

OPEN, CLOSE = THOUGHT
_TRIED = "omega"  # the thought by which a template is tried


def split_thought(text: str) -> tuple[str, str]:
    """Returns the thought of a whole turn and the text after it; "" for a turn without a thought.

    >>> split_thought("<think>hmm</think>I add."), split_thought("hmm</think>I add."), split_thought("I add.")
    (('hmm', 'I add.'), ('hmm', 'I add.'), ('', 'I add.'))
    """
    if OPEN not in text and CLOSE not in text:
        return "", text
    begins = text.lstrip().startswith(OPEN)
    thought, closed, rest = (text.lstrip().removeprefix(OPEN) if begins else text).partition(CLOSE)
    if not begins and (not closed or OPEN in thought):
        return "", text
    return thought.strip(), rest.lstrip()


def with_thought_in_text(message: Message) -> Message:
    """Returns a message with the thought of its field `reasoning_content` at the beginning of its text.

    >>> with_thought_in_text({"role": "assistant", "content": "I add.", "reasoning_content": "hmm"})["content"]
    '<think>\\nhmm\\n</think>\\n\\nI add.'
    """
    if not message.get("reasoning_content"):
        return message
    rest = {name: value for name, value in message.items() if name != "reasoning_content"}
    return {**rest, "content": f"{OPEN}\n{message['reasoning_content']}\n{CLOSE}\n\n{message['content']}"}


def shows_thoughts(chat: ChatTemplate) -> bool:
    """Returns whether the template shows the field `reasoning_content` of a message."""
    thinking: Message = {"role": "assistant", "content": "c", "reasoning_content": _TRIED}
    try:
        return _TRIED in chat.decode(chat.prompt_ids([{"role": "user", "content": "u"}, thinking]))
    except ValueError:  # TemplateError is one
        return False


class ThoughtReader:
    """Finds the thought while the text of a turn grows. opened: whether the prompt has opened it.

    thought: what was read of it so far. begin: where the text after it begins; while that is unknown, the end of all
    text. settled: whether it is known, so that there is nothing more to read.
    """

    def __init__(self, *, opened: bool) -> None:
        self.thought = ""
        self.begin = 0
        self.settled = False
        self._read: int | None = 0 if opened else None  # up to where the thought was read; None: it has not begun
        self._closed: int | None = None  # where it ends, tag included

    def read(self, text: str, *, ended: bool = False) -> str:
        """Returns what is new of the thought.

        text: all that a client may read so far. ended: whether it is complete.
        """
        if self._read is None:
            start = text.lstrip()
            if not start.startswith(OPEN):
                self.settled = ended or not OPEN.startswith(start)  # there is no thought
                self.begin = 0 if self.settled else len(text)
                return ""
            self._read = len(text) - len(start) + len(OPEN)
        new = ""
        if self._closed is None:
            close = text.find(CLOSE, self._read)
            end = close if close >= 0 else len(text) - (0 if ended else overlap(text, CLOSE))
            new = self._take(text[self._read : end])
            self.begin = len(text)
            if close >= 0:
                self._closed = close + len(CLOSE)
        if self._closed is not None:
            rest = text[self._closed :].lstrip()
            self.begin, self.settled = len(text) - len(rest), bool(rest)
        return new

    def _take(self, piece: str) -> str:
        """Returns the next piece of the thought up to the white space at its end, behind which it may be over."""
        assert self._read is not None
        self._read += len(piece.rstrip())
        new = piece.rstrip() if self.thought else piece.strip()
        self.thought += new
        return new
