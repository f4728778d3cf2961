"""The real learner on fake GPUs: what one rank of several allocates and executes, without a GPU and its memory.

    python -m tests.support.fake_learner CELLS.json

CELLS.json holds a list of `Cell`; a line of JSON is printed for each. The rank is rank 0, which reads the checkpoint
and publishes. Fake are, beside tensors: collectives do nothing, metrics are made up, nothing is read or written.

What is not seen: memory between allocations, CUDA's and NCCL's own, and what kernels take for themselves, except that
of FlashAttention's backward pass.
"""

import json
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from unittest.mock import patch


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Says which model is trained, and how.

    model: as `recipes/rstar2/fit.py` takes it. layers: how many of its layers, None for all. tokens: inputs of a row.
    sampled: share of them that are targets. learner: fields of LearnerConfig.
    """

    model: str
    ranks: int
    tokens: int
    layers: int | None = None
    sampled: float = 0.8
    learner: dict = field(default_factory=dict)

    def write(self, folder):
        """Writes the model's config.json."""
        from recipes.rstar2.parts.memory.model import configuration

        config = configuration(self.model)
        if self.layers:
            config.num_hidden_layers, config.layer_types = self.layers, None
        config.save_pretrained(folder)
        return folder


def measure(cell):
    """Returns the bytes on GPU and host in each phase, and the operations of a step with one row."""
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils.flop_counter import FlopCounterMode

    from algo.learner.trainer import Trainer
    from tests.support.fake_gpu import GPU, Memory

    dist.init_process_group(f"cpu:fake,{GPU}:fake", rank=0, world_size=cell.ranks, store=FakeStore())
    source = cell.write(Path(tempfile.mkdtemp()))
    phases = {}
    with FakeTensorMode(allow_non_fake_inputs=True), Memory() as memory:

        def phase(name):
            phases[name] = {
                "peak": memory.peak[GPU],
                "now": memory.now[GPU],
                "host_peak": memory.peak["cpu"],
                "host": memory.now["cpu"],
            }
            memory.reset()

        canary = [1] * 65  # long enough that each rank that shares a row has several of its positions
        trainer = Trainer(_config(cell), source, [canary], source, seed=0)
        phase("load")
        kernels = torch.ops.torch_attn._varlen_attn, torch.ops.torch_attn._varlen_attn_backward
        counts = {kernel: _causal(kernel) for kernel in kernels} | {torch.ops.aten._grouped_mm: grouped}
        counter = FlopCounterMode(display=False, custom_mapping=counts)
        for step in (1, 2):  # the first makes the optimizer's state; the counter keeps activations alive
            with counter if step == 1 else nullcontext():
                trainer.train(_batch(cell, rows=step), version=step)
            phase("train")
            trainer.publisher.publish(step)
            phase("publish")
            trainer.score_canary()
            trainer.release_gpu()
            phase("rest")
    dist.destroy_process_group()
    [plan] = trainer.plan(_batch(cell, rows=1), 1)
    needed = trainer.cost.of(targets=plan.loss_tokens, lengths=plan.lengths) / cell.ranks
    return {
        "phases": phases,
        "executed": counter.get_total_flops(),
        "needed": needed,
        "parameters": trainer.parameters,
    }


def grouped(rows, matrices, *_shapes, **_options):
    """Returns the operations of one product for each group of rows, of which PyTorch's counter knows nothing.

    Gradients of weights are products of both with the rows in the middle.
    """
    return 2 * rows[0] * rows[1] * matrices[-1]


def _causal(kernel):
    """Returns the count of a kernel's operations that leaves out half of the square, which PyTorch counts whole."""
    from torch.utils.flop_counter import flop_registry

    def count(*inputs, **options):
        return flop_registry[kernel](*inputs, **options) // 2

    count._get_raw = True  # it is given tensors, not shapes
    return count


def _config(cell):
    from algo.learner.config import LearnerConfig

    fixed = {"dtype": "bfloat16", "weights_dtype": "bfloat16", "device": "cuda", "minibatches": 1}
    return LearnerConfig(**fixed, share_prefix=False, micro_batch_tokens=cell.tokens, **cell.learner)


def _batch(cell, rows):
    """Returns a batch of so many rows for each rank, or for each group of ranks that share rows; with two of them
    gradients are added up.
    """
    import numpy as np

    from engine.types import Batch

    count, length = rows * cell.ranks // cell.learner.get("context_parallel", 1), cell.tokens + 1
    sampled_T = np.arange(length) >= round(length * (1 - cell.sampled))
    return Batch(
        step=0,
        token_ids_N=np.ones(count * length, np.int32),
        sampled_N=np.tile(sampled_T, count),
        logprobs_N=np.full(count * length, -1, np.float32),
        versions_N=np.zeros(count * length, np.int32),
        lengths_B=np.full(count, length, np.int32),
        advantages_B=np.ones(count, np.float32),
    )


def fake():
    """Puts fake GPUs in the place of CUDA's, for this process."""
    import numpy as np
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.distributed.device_mesh import init_device_mesh
    from torch.utils._python_dispatch import _disable_current_modes
    from transformers import AutoConfig, AutoModelForCausalLM

    from algo.learner import trainer
    from algo.learner.model import loading, sharding
    from algo.learner.state import publish
    from tests.support import fake_gpu

    fake_gpu.install()
    add_adapters = loading.add_adapters

    def mesh(_device, *shape, **names):
        with _disable_current_modes():
            return init_device_mesh(fake_gpu.GPU, *shape, **names)

    def read(source, attention):
        config = AutoConfig.from_pretrained(source)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)

    def add_fake_adapters(model, config):  # peft calls .to(device), which fake parameters refuse
        with patch.object(torch.nn.Module, "to", lambda module, *_args, **_options: module):
            add_adapters(model, config)

    def reduced(_counts, _square, **_options):
        return {"tokens": 1.0, "loss": 1.0, "square": 0.25, "ratio_max": 1.0, "mismatch_checked": 0.0}

    loading.choose_device = trainer.choose_device = lambda _name: torch.device(fake_gpu.GPU, 0)
    loading.read, loading.add_adapters = read, add_fake_adapters
    sharding.init_device_mesh = mesh
    make_canary = trainer.Canary.__init__

    def canary_of_real_ids(*arguments):
        with _disable_current_modes():
            make_canary(*arguments)

    trainer.Canary.__init__ = canary_of_real_ids
    # Which experts are reached depends on values, so all are.
    trainer.Canary._pass = lambda canary, sequences: (canary._forward(sequences)[0], [canary._experts])
    trainer.ExpertLoad.counted = lambda _load, _micro: nullcontext()  # it looks at values
    trainer.ExpertLoad.metrics = lambda _load: {}
    trainer.reduced, trainer.statistics = reduced, lambda _tokens, _live: {}
    trainer.Checkpoints = lambda _scorer, _optimizer: None
    publish.transport = lambda *_args, **_options: publish.Silent()
    FakeTensor.numpy = lambda tensor: np.zeros(tuple(tensor.shape), np.float32)


if __name__ == "__main__":
    fake()
    for fields in json.loads(Path(sys.argv[1]).read_text()):
        cell = Cell(**fields)
        print(json.dumps({"cell": asdict(cell), **measure(cell)}), flush=True)
