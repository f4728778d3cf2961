"""Runs one rank of the learner: `engine.learner.launch` starts `python -m algo.learner` (algo/learner/learner.py)."""

from algo.learner.learner import leave, main

leave(main())
