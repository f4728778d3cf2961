"""A rank leaves while one of gloo's threads waits for Python's lock to let go of tensors: `algo_leave.py STORE`, a file
that does not exist. Ends with the code of that rank.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

from algo.learner.learner import leave

if __name__ == "__main__":
    leaver = os.fork()
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(leaver == 0), world_size=2)
    parts, own = [torch.zeros(1), torch.zeros(1)], torch.ones(1)
    dist.barrier()
    if leaver:
        time.sleep(0.5)
        dist.all_gather(parts, own)
        leave(os.waitstatus_to_exitcode(os.waitpid(leaver, 0)[1]) % 256)
    else:
        sys.setswitchinterval(100)  # nobody else gets the lock while this rank computes
        dist.all_gather(parts, own, async_op=True)
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            pass
        leave(0)
