"""Traces a whole train step, optimizer included, on fake tensors and fake ranks, and fails where the host reads what
the step computes. A process of its own: python host_reads.py DATA KNOBS SABOTAGE, the last two as literals."""

import ast
import os
import sys

from conftest import ROOT  # noqa: F401  (finds the modules)

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import harness
import moe
import parallel
import train

READS = {"cpu", "numpy", "tolist", "item", "__bool__", "__float__", "__int__", "__index__"}


class NoHostReads(TorchFunctionMode):
    """FakeTensorMode raises where a value is needed, but lets tensors go to the CPU, where these already are."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        # torch's own code says tensor.to(other.device) of tensors that are there
        by_torch = sys._getframe(1).f_code.co_filename.startswith(os.path.dirname(torch.__file__))
        to_cpu = name == "to" and not by_torch and any(
            str(word) == "cpu" for word in [*args[1:], *kwargs.values()] if isinstance(word, (str, torch.device)))
        assert name not in READS and not to_cpu, f"the host reads a tensor: {name}"
        return function(*args, **kwargs)


def main(data, knobs, sabotage):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    members, load = parallel.Sizes.members, moe.MoE.load

    def real_members(self, *args):      # about ranks, not about tokens
        with unset_fake_temporarily():
            return members(self, *args)

    def read(self, plan, batch):
        exec(sabotage, {"x": plan.counts_E, "torch": torch})
        return load(self, plan, batch)

    parallel.Sizes.members, moe.MoE.load = real_members, read
    with FakeTensorMode(allow_non_fake_inputs=True):
        trainer = train.Trainer(harness.config(data=data, **knobs), 4)
        batches = list(trainer.batches(0))
        trainer.batches = lambda step: batches
        with NoHostReads():
            trainer.step(0)
    print("no host reads")


if __name__ == "__main__":
    main(sys.argv[1], ast.literal_eval(sys.argv[2]), sys.argv[3])
