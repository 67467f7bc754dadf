"""A step with an all-reduce over NCCL, captured as one CUDA graph by hand: the bits of the eager step.

Lockstep leaves NCCL out of its graphs (decision 11). This holds that nothing in a step stands in the way.
"""

import numpy as np
import pytest
import torch

from lockstep.backends import flat as as_vector
from lockstep.backends import load_backend
from lockstep.core.device import Device
from lockstep.core.layout import layout_of, sha256_of
from lockstep.data.batch import Batch
from lockstep.models import CrossEntropySum
from lockstep.models.lenet import init_lenet, lenet
from lockstep.optim.optimizers import Sgd
from lockstep.partition.balance import Balance
from lockstep.partition.batch import split_into_shards
from lockstep.replicas.flat import FlatReplica, FlatTrainSpec
from lockstep.runtime.communicators import Communicator
from lockstep.runtime.inprocess import InProcess
from lockstep.runtime.process_group import ProcessGroup
from lockstep.runtime.step import StepOptions, train_step
from lockstep.runtime.store import LOOPBACK, join_store, serve_store
from lockstep.schedules.instructions import GRADIENTS
from lockstep.schedules.reduction_tree import Node, sum_of

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible on this machine"),
]
TORCH, GPU = load_backend("torch"), Device("cuda:0")
NUM_SHARDS, BATCH, NUM_STEPS = 8, 256, 20


def test_a_captured_step_with_nccl_gives_the_bits_of_the_step():
    params = {name: 3 * array for name, array in init_lenet(0).items()}
    layout = layout_of(params)
    start = layout.flatten(list(params.values()))
    optimizer = Sgd(0.1, momentum=0.9)
    random = np.random.RandomState(0)
    batches = [
        (random.rand(BATCH, 1, 28, 28).astype(np.float32), random.randint(0, 10, BATCH)) for _ in range(NUM_STEPS)
    ]
    shards = split_into_shards(BATCH, NUM_SHARDS)

    with InProcess(TORCH, [GPU]) as engine:
        spec = FlatTrainSpec(TORCH, lenet, layout, optimizer)
        replicas = [FlatReplica(spec, TORCH.from_numpy(start.copy(), GPU))]
        for step, (X, y) in enumerate(batches, start=1):
            X_gpu, y_gpu = torch.from_numpy(X).cuda(), torch.from_numpy(y).cuda()

            def fetch(rank, first, last, X_gpu=X_gpu, y_gpu=y_gpu):
                return X_gpu[first:last].clone(), y_gpu[first:last].clone()

            train_step(engine, replicas, StepOptions(NUM_SHARDS), Balance(), step, Batch(BATCH, fetch))
        expected = sha256_of([TORCH.to_numpy(replicas[0].flat)])

    store, port, _ = serve_store()
    group = ProcessGroup(join_store(LOOPBACK, port, 30.0), 0, [GPU], LOOPBACK, 30.0)
    with TORCH.session([GPU]):
        flat = torch.from_numpy(start.copy()).cuda()
        state = optimizer.start(flat)
        inputs = [
            (torch.zeros(len(s), 1, 28, 28, device="cuda"), torch.zeros(len(s), dtype=torch.int64, device="cuda"))
            for s in shards
        ]

        def step_once():
            def leaf(number):
                return as_vector(TORCH.value_and_grad(CrossEntropySum(lenet), layout, flat, *inputs[number])[1])

            total = sum_of(Node(0, NUM_SHARDS), leaf, TORCH.add)
            group.backend(Communicator(GRADIENTS, (0,))).allreduce([total]).wait()
            new, new_state = optimizer(flat, total / BATCH, state, 1, 1.0)
            return new, new_state

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                step_once()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            new, new_state = step_once()
        for X, y in batches:
            for shard, (X_shard, y_shard) in zip(shards, inputs, strict=True):
                X_shard.copy_(torch.from_numpy(X[shard.start : shard.stop]))
                y_shard.copy_(torch.from_numpy(y[shard.start : shard.stop]))
            graph.replay()
            flat.copy_(new)
            for kept, changed in zip(state, new_state, strict=True):
                kept.copy_(changed)
        torch.cuda.synchronize()
        found = sha256_of([TORCH.to_numpy(flat)])
    group.close()
    assert found == expected
    del store
