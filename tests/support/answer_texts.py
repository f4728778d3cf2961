"""Texts as a model that repeats itself writes them: for tests of what reads them on the node's loop."""

from collections.abc import Iterator

_MATHEMATICS = r"""0 1 5 9 . , ; : - + * ** / ^ _ = < > ! ' " ` $ $$ \$ % \% ( ) [ ] { } \{ \} & x a E i ab abc abcd
\frac \frac{1}{2} \sqrt \overline{3} \dot{1} \left \right \left( \, \! \; ~ \\ \boxed{ \fbox{ \begin{array}{cc}
\begin{array} \end{array} \begin{pmatrix}
\cdot \times x10^ \times10^ 10^{ e9 _2 _{8} \pmod \pmod7 ^\circ \ldots ... 1,234 1{,}234 {,}
1/2 0.333 0.\overline{3} 1(2) ½ ² √ ₂ é ﷺ € π \choose \color{ \mathbb{R} \in \lor \cup \infty ^9 ^{-9} m^2 | \|"""
_WORDS = r"""and|or|is|the |not |ten |cm|feet|hours |per |square |million |a |word |Area |Area =|= \text{Area}|answer: |
The answer is |Option |(A) |(E)|A. |B: |\text{(E)}|\text{|\text{a}|\text{ cm}|\text{or}|\text{m}^2|\textbf{|\mathrm{|
\textcolor{red}{|3:45 p.m.|1 1/2|33 1/3\%|1 234|all real numbers|no solution|base |
\{ x \choose |0.333... |the answer is |x=|a: |1e9|1,|\text{a} |1 |or 1 |1/2 |m^2 """
_OTHERS = (" ", "\n", "\t", "\ue000", "\ue001", "\u200b", "<answer>", "</answer>", "<|im_end|>", "</tool_call>")
_OTHERS += ("```", "```json", '{"score": ', "[", '"a"')

ATOMS = tuple(dict.fromkeys([*_MATHEMATICS.split(), *filter(None, _WORDS.replace("\n", "").split("|")), *_OTHERS]))
BEGINNINGS = ("", "5", "5 abcd", r"5\text{ cm}", "(E) ", "**", "The area is ", "```json")
ENDS = ("", "x", "#", ".", "}", ")", "$")


def repeated(first: str, second: str, length: int = 2000) -> Iterator[str]:
    """The pair again and again, behind and before what begins and ends answers."""
    for beginning, end in zip(BEGINNINGS, (*ENDS, "5"), strict=True):
        yield (beginning + (first + second) * length)[: length - len(end)] + end
