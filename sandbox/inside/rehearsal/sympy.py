# ruff: noqa: F403, F405
# mypy: ignore-errors

from sympy import *

a, b = symbols("a b")
n = symbols("n", integer=True, positive=True)
print(solve(a**2 - 3 * a + 1, a), solve([a + b - 3, a - 2 * b], [a, b]), solve(a**3 - a - 7 + b, a)[0])
print(roots(a**2 + a - 6))
print(simplify((a**2 - 1) / (a - 1)), factor(a**4 - 1), expand((a + b) ** 3), diff(sin(a) * exp(a), a), latex(a / b))
print(integrate(a * cos(a), a), integrate(exp(-a), (a, 0, oo)), limit(sin(a) / a, a, 0), series(cos(a), a, 0, 4))
print(Matrix([[1, 2], [3, 4]]).inv(), Matrix([[2, 1], [1, 2]]).eigenvals(), summation(n, (n, 1, 10)), N(pi, 20))
print(factorint(360), gcd(12, 18), isprime(97), binomial(6, 2), sqrt(8), Rational(1, 3) + 1)
print(nsimplify(0.5), apart(1 / (a**2 + a)), Poly(a**2 + 1, a), divisors(12))
print(solveset(a**2 - 5, a), Eq(a, 2), (a + 1).subs(a, 2), trigsimp(sin(a) ** 2 + cos(a) ** 2))
