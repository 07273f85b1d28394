"""A process that saves checkpoints until it is killed. Apart from the tests, so that it starts quickly."""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from training import network

from titan_moe.checkpoint import Checkpointer, background


def stamp(model, step):
    """Make every value of the model tell the step."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(step)


def stamped_step(model):
    values = {value.item() for tensor in model.state_dict().values() for value in tensor.unique()}
    assert len(values) == 1, values
    return int(values.pop())


def hold_a_writer(folder, connection):
    """Tell the process id of the writer, which waits for that of another rank, then wait to be killed."""
    background.world_size, background.rank, background.broadcast_object = lambda: 2, lambda: 0, lambda port: port
    checkpointer = Checkpointer(folder, async_mode="process")
    connection.send(checkpointer._background._writer._process.pid)
    time.sleep(600)


def save_forever(folder, world=1, rank=0, store=None):
    """Resume from the newest checkpoint and save one per step until killed, keeping two."""
    torch.set_num_threads(1)
    if world > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(store, world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=5))
    checkpointer = Checkpointer(folder, keep_latest_k=2)
    model = network()
    loaded = checkpointer.load(model)
    step = 0 if loaded is None else loaded.step
    assert loaded is None or stamped_step(model) == step
    while True:
        step += 1
        stamp(model, step)
        checkpointer.save(step, model, extra={"step": step})
