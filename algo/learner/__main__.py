"""One rank of the learner: `engine.learner.launch` runs `python -m algo.learner` (see algo/learner/learner.py)."""

from algo.learner.learner import leave, main

leave(main())
