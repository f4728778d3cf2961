"""Trajectories with their tokens coloured by entropy, as one HTML page that stands alone.

Promises
- Whatever the model, a tool or a question wrote is text on the page: it is escaped, control characters are shown as
  symbols, and the page's own policy lets nothing run or load.
- It can be read in light and in dark, as the reader's system asks.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from engine.stages.write_rollouts import Rollout
from recipes.rstar2.parts.analysis.token_entropy import FORKING_PHRASES, Scored

LEVELS = 9  # of colour; level 1 begins above a tenth of the entropy that the last one stands for
WHOLE_TOKENS = 2000  # of a trajectory that is shown whole; from the middle of a longer one some are left out
BEFORE, AFTER = 40, 25  # tokens around an example

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1a1a1a; --soft: #666; --line: #d0d0d0; --given: #f2f2f2;
  --call: #e8f0fa; --reply: #eaf5ea; --bad: #fbe9e7; --hot: 230, 85, 13; --fork: #6a3d9a; --reflect: #1f78b4; }
@media (prefers-color-scheme: dark) { :root { --paper: #161616; --ink: #e6e6e6; --soft: #9a9a9a; --line: #3a3a3a;
  --given: #222; --call: #1b2735; --reply: #1b2b1d; --bad: #38201d; --hot: 255, 140, 60; --fork: #c9a6f0;
  --reflect: #7cc0f0; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; } h2 { margin-top: 2.5rem; } .soft { color: var(--soft); }
table { border-collapse: collapse; margin: 1rem 0; } td, th { padding: .2rem .8rem .2rem 0; text-align: left;
  border-bottom: 1px solid var(--line); } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
img { max-width: 100%; background: #fff; border-radius: 6px; }
.box { border: 1px solid var(--line); border-radius: 6px; margin: 1rem 0; padding: .6rem .8rem; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.65 ui-monospace, monospace; }
.part { border-radius: 4px; padding: .3rem .5rem; margin: .3rem 0; } .part > b { display: block;
  font: 600 11px system-ui, sans-serif; color: var(--soft); }
.given { background: var(--given); color: var(--soft); } .call { background: var(--call); }
.reply { background: var(--reply); } .reply.bad { background: var(--bad); }
.f { border-bottom: 2px dashed var(--fork); } .r { border-bottom: 2px solid var(--reflect); }
.f.r { border-bottom: 3px double var(--fork); } .here { outline: 2px solid currentColor; border-radius: 2px; }
"""
STYLE += "".join(f".e{level} {{ background: rgba(var(--hot), {level / 11:.2f}); }}\n" for level in range(1, LEVELS + 1))

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

# Control characters as the symbols that Unicode has for them: a browser drops them, and some end a page.
_SYMBOLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
# What would turn the direction of the text around it.
_SYMBOLS |= dict.fromkeys((*range(8234, 8239), *range(8294, 8298)), 65533)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """A trajectory and its tokens."""

    row: Rollout
    scored: Scored


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """above: the threshold of high entropy; top: the entropy of the strongest colour; after_reply: as in `shares`."""

    above: float
    top: float
    after_reply: int

    @classmethod
    def of(cls, shown: Sequence[Shown], above: float, after_reply: int) -> Scale:
        """The strongest colour is that of the most uncertain hundredth."""
        entropies_N = np.concatenate([each.scored.entropy_T[each.scored.marks.sampled_T] for each in shown])
        return cls(above=above, top=max(1e-6, float(np.quantile(entropies_N, 0.99))), after_reply=after_reply)


def text_of(text: str) -> str:
    """Escaped, also for an attribute.

    >>> text_of('<b title="x">\\x00')
    '&lt;b title=&quot;x&quot;&gt;␀'
    """
    return escape(text.translate(_SYMBOLS), quote=True)


def page(
    *,
    title: str,
    facts: Sequence[str],
    steps: Sequence[Mapping[str, Any]],
    notes: Sequence[str],
    plots: Sequence[Path],
    shown: Sequence[Shown],
    examples: int,
    scale: Scale,
) -> str:
    """The whole page. facts: sentences on how it was made; notes: what of the report is not drawn."""
    body = [
        f"<h1>{text_of(title)}</h1>",
        *(f"<p class='soft'>{text_of(fact)}</p>" for fact in facts),
        _legend(scale),
        _steps_table(steps),
        *(f"<p><img alt='{text_of(path.stem)}' src='{_inline(path)}'></p>" for path in plots),
        *(f"<p class='soft'>{text_of(note)}</p>" for note in notes),
        _phrases_table(steps[-1]),
        *_contexts(shown, examples, scale),
        f"<h2>{min(examples, len(shown))} whole trajectories</h2>",
        *(_whole(each, scale) for each in most_uncertain(shown, scale)[:examples]),
    ]
    head = (
        f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{text_of(title)}</title><style>{STYLE}</style></head>\n<body>\n"
    )
    return head + "\n".join(body) + "\n</body></html>\n"


def _inline(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


def _legend(scale: Scale) -> str:
    ramp = "".join(
        f"<span class='e{level}'> {scale.top * level / LEVELS:.2f} </span>" for level in range(1, LEVELS + 1)
    )
    phrases = ", ".join(FORKING_PHRASES)
    return (
        f"<p class='text'>entropy in nats: {ramp}</p>"
        f"<p><span class='f'>forking</span>: above the threshold of {scale.above:.3f} and of a phrase outside of calls "
        f"(<span class='soft'>{text_of(phrases)}</span>). <span class='r'>reflection</span>: above it and one of the "
        f"first {scale.after_reply} sampled tokens after a tool's reply. Hover over a token for its numbers.</p>"
    )


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column is text, the others are numbers."""
    kinds = ["", *[" class='n'"] * (len(header) - 1)]
    head = "".join(f"<th{kind}>{text_of(name)}</th>" for kind, name in zip(kinds, header, strict=True))
    lines = [
        "<tr>" + "".join(f"<td{kind}>{text_of(cell)}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    ]
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _steps_table(steps: Sequence[Mapping[str, Any]]) -> str:
    header = ("step", "trajectories", "tokens", "mean entropy", "mean -log p", "threshold")
    header += ("forking of high", "reflection of high", "high among forking", "high among reflection", "in calls")
    rows = [
        [
            str(row["step"]),
            str(row["trajectories"]),
            f"{row['tokens']:,}",
            *(f"{row[name]:.3f}" for name in ("entropy", "nll", "threshold")),
            *(_percent(row["of_high"][kind]) for kind in ("forking", "reflection")),
            *(_percent(row["high_among"][kind]) for kind in ("forking", "reflection", "tool call")),
        ]
        for row in steps
    ]
    return "<h2>Steps</h2>" + _table(header, rows)


def _phrases_table(last: Mapping[str, Any]) -> str:
    phrases = [
        [row["phrase"], str(row["count"]), f"{row['entropy']:.2f}", _percent(row["high"])]
        for row in last["phrases"][:20]
    ]
    words = [[repr(row["token"]), str(row["high"]), str(row["count"])] for row in last["words"]]
    found = _table(("phrase", "times", "entropy of its first token", "high"), phrases) if phrases else "<p>None.</p>"
    return (
        f"<h2>Forking phrases of step {last['step']}</h2>{found}"
        f"<h2>Tokens that are most often above the threshold</h2>{_table(('token', 'above', 'in all'), words)}"
    )


def most_uncertain(shown: Sequence[Shown], scale: Scale) -> list[Shown]:
    """Trajectories with a tool's reply first, of these the ones with most forking and reflection tokens above it."""

    def key(each: Shown) -> tuple[bool, int]:
        kinds_T = _kinds(each.scored, scale)
        return len(each.row.turns) < 2, -sum(kind != "" for kind in kinds_T)

    return sorted(shown, key=key)


def _kinds(scored: Scored, scale: Scale) -> list[str]:
    """The classes "f", "r" of each token above the threshold."""
    marks = scored.marks
    high_T = marks.sampled_T & (scored.entropy_T > scale.above)
    forking_T = high_T & marks.forking_T
    reflection_T = high_T & (marks.after_reply_T > 0) & (marks.after_reply_T <= scale.after_reply)
    return [" f" * f + " r" * r for f, r in zip(forking_T.tolist(), reflection_T.tolist(), strict=True)]


def _contexts(shown: Sequence[Shown], examples: int, scale: Scale) -> Iterator[str]:
    """The tokens of each kind with the highest entropy, one of a trajectory, with what is around them."""
    for sign, name in (("f", "Forking"), ("r", "Reflection")):
        best: list[tuple[float, int, int]] = []
        for number, each in enumerate(shown):
            kinds_T = _kinds(each.scored, scale)
            places = [at for at, kind in enumerate(kinds_T) if sign in kind]
            if places:
                entropy, at = max((float(each.scored.entropy_T[at]), -at) for at in places)
                best.append((-entropy, number, -at))
        yield f"<h2>{name} tokens in context</h2>"
        if not best:
            yield "<p>None.</p>"
        for _, number, at in sorted(best)[:examples]:
            each = shown[number]
            first, last = max(0, at - BEFORE), min(len(each.scored.texts_T), at + AFTER)
            inside = "".join(_token(each.scored, place, scale, here=place == at) for place in range(first, last))
            yield f"<div class='box'><div class='soft'>{_heading(each.row)}</div><div class='text'>{inside}</div></div>"


def _heading(row: Rollout) -> str:
    grade = "no grade" if row.reward is None else f"reward {row.reward:g}"
    return text_of(f"step {row.step}, {row.prompt_id} #{row.sample}, {grade}, {row.tokens} tokens, ended by {row.stop}")


def _token(scored: Scored, at: int, scale: Scale, *, here: bool = False) -> str:
    text = text_of(scored.texts_T[at])
    if not text:  # its character stands at a later token
        return ""
    if not scored.marks.sampled_T[at]:
        return f"<span class='given'>{text}</span>"
    entropy = float(scored.entropy_T[at])
    level = min(LEVELS, int(entropy / scale.top * LEVELS))
    marks = scored.marks
    names = [f"e{level}"] if level else []
    if entropy > scale.above:
        names += ["f"] * bool(marks.forking_T[at])
        names += ["r"] * bool(0 < marks.after_reply_T[at] <= scale.after_reply)
    names += ["here"] * here
    kind = f" class='{' '.join(names)}'" if names else ""
    return f"<span{kind} title='entropy {entropy:.3f}, p {np.exp(scored.logprob_T[at]):.3f}'>{text}</span>"


def _whole(each: Shown, scale: Scale) -> str:
    parts = "".join(_parts(each, scale))
    return f"<div class='box'><h3>{_heading(each.row)}</h3><div class='text'>{parts}</div></div>"


def _parts(each: Shown, scale: Scale) -> Iterator[str]:
    """Prompt, text, calls and replies, each in a box of its own."""
    scored, marks = each.scored, each.scored.marks
    size = len(scored.texts_T)
    left_out = range(WHOLE_TOKENS // 2, size - WHOLE_TOKENS // 2) if size > WHOLE_TOKENS else range(0)
    outcomes: dict[int, list[str]] = {}
    for call in each.row.calls:
        outcomes.setdefault(call.turn, []).append(call.outcome)

    def part_of(at: int) -> tuple[int, str]:
        turn = int(marks.turn_T[at])
        if turn >= 0:
            return turn, "call" if marks.call_T[at] else "said"
        before = [number for number, (_, end) in enumerate(each.row.turns) if end <= at]
        return (before[-1], "reply") if before else (-1, "prompt")

    for (turn, name), places in groupby(range(size), part_of):
        tokens = list(places)
        kept = [at for at in tokens if at not in left_out]
        if name in ("prompt", "reply"):
            inside = text_of("".join(scored.texts_T[at] for at in kept))
        else:
            inside = "".join(_token(scored, at, scale) for at in kept)
        if len(kept) < len(tokens):
            inside += f"<span class='soft'> [{len(tokens) - len(kept)} tokens are left out] </span>"
        failed = name == "reply" and any(outcome != "ok" for outcome in outcomes.get(turn, []))
        label = {"prompt": "prompt", "call": "tool call", "said": ""}.get(name, "")
        if name == "reply":
            label = text_of(f"reply: {', '.join(outcomes.get(turn, [])) or 'none'}")
        kind = {"prompt": "part given", "call": "part call", "reply": "part reply"}.get(name, "part")
        head = f"<b>{label}</b>" if label else ""
        yield f"<div class='{kind}{' bad' if failed else ''}'>{head}{inside}</div>"
