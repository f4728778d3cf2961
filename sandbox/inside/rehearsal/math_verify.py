# mypy: ignore-errors

from math_verify import LatexExtractionConfig, parse, verify

PAIRS = (
    (r"\frac{3}{4}", "0.75"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    ("x^2+2x+1", "(x+1)^2"),
    ("(1,2)", "(1, 3)"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("[0,1)", "[0,1)"),
    (r"5\pi", r"\pi \cdot 5"),
    ("x=3", "3"),
)
for pair in PAIRS:
    read = [parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=None) for text in pair]
    print(read, verify(*read, timeout_seconds=None))
