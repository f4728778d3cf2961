# mypy: ignore-errors

import numpy as np

a = np.array([[2.0, 1.0], [1.0, 3.0]])
print(a, a @ a, np.linalg.solve(a, a[0]), np.linalg.inv(a), np.linalg.eigvals(a), np.linalg.det(a), a.sum(), a.mean())
print(np.arange(5), np.linspace(0, 1, 3), np.zeros(2), np.polyfit([0, 1, 2], [1, 2, 5], 1), np.roots([1, -3, 2]))
print(np.random.rand(2), np.random.randint(0, 9, 3), np.prod(np.array([1, 2])), np.where(a > 1), np.gcd(4, 6))
