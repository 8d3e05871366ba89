"""A rank of a sampler but the first: does what rank 0 does, on its own share (``followers``, ``sharded``).

It is started by rank 0 with the number of a socket, and ends when rank 0 has ended or closed it, in an
order or in a collective. What it cannot do it tells rank 0, and prints nothing.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from pathlib import Path

import torch

from ostinato.engine.followers import Allocate, Answer, Begin, Channel, Draw, Pass, Serve, is_waiting
from ostinato.engine.paged import KVStore, Rows
from ostinato.engine.runner import Runner
from ostinato.model.config import read_config
from ostinato.model.decoder import Decoder
from ostinato.model.hf import load_model
from ostinato.model.native import load as load_kernels
from ostinato.model.ops import TORCH_OPS
from ostinato.model.shared import shared_model
from ostinato.model.wire import unpack
from ostinato.parallel.layout import Layout
from ostinato.parallel.links import Links
from ostinato.parallel.own_mesh import OwnMesh
from ostinato.parallel.replicated import replicated_ops
from ostinato.parallel.shares import shares_of
from ostinato.parallel.watch import last_line


def main(descriptor: int) -> int:
    """Until rank 0 has had enough. The exit code is 1 where this rank has failed."""
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        run(channel.receive(), channel)
    except BaseException as error:
        with contextlib.suppress(OSError):  # rank 0 may be gone, which is no fault
            channel.send(Answer(fault=last_line(error), waited=is_waiting(error)))
            return 1
    return 0


def run(begin: Begin, channel: Channel) -> None:
    """Load, and follow."""
    layout = Layout.parse(begin.layout)
    channel.send(Answer(text="here"))
    mesh = OwnMesh(layout, begin.rank, port=begin.port, timeout_s=begin.timeout_s)
    mesh.connect()
    decoder = load_share(begin)
    channel.send(Answer(text="loaded"))
    allocate = channel.receive()
    assert isinstance(allocate, Allocate)
    blocks = allocate.blocks
    store = KVStore.allocate(
        decoder.config.num_layers, blocks, decoder.kv_shape, decoder.dtype, decoder.device
    )
    kernels, links = load_kernels() if begin.native else None, Links(mesh)
    ops = replicated_ops(kernels.ops if kernels else TORCH_OPS, links, layout)
    gives = layout.coords(begin.rank).data == 0  # ranks that hold the same vocabulary give it once

    def give(logits: torch.Tensor) -> torch.Tensor:
        links.collected(logits, "t", 0)
        return logits

    follow(Runner(decoder, kernels, store, fused=False, ops=ops, join=give), channel, gives)


def load_share(begin: Begin) -> Decoder:
    """The rank's part of the model."""
    folder, dtype = Path(begin.folder), getattr(torch, begin.dtype)
    (share,) = shares_of(Layout.parse(begin.layout), read_config(folder), begin.rank)
    if begin.shared:
        return shared_model(folder, dtype, fp32_head=begin.fp32_head, share=share)
    return load_model(folder, dtype, fp32_head=begin.fp32_head, share=share)


def follow(runner: Runner, channel: Channel, gives_logits: bool) -> None:
    """Do as told until the other side ends the stream."""
    hidden = torch.empty(0)
    while True:
        try:
            told = channel.receive()
        except (EOFError, ConnectionError):
            return
        if isinstance(told, Serve):
            part = unpack(told.payload, runner.decoder.local)
            runner.serve(part)
            channel.send(Answer(text=runner.fingerprint))
        elif isinstance(told, Pass):
            for sources, targets in told.copies:
                runner.copy_blocks(sources, targets)
            rows = {name: runner.on_device(array) for name, array in told.rows.items()}
            hidden, _ = runner.forward(told.tokens, told.positions, Rows(**rows))
        elif isinstance(told, Draw) and gives_logits:
            for _ in runner.logits(hidden, told.rows):
                pass


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))

__all__ = ["follow", "load_share", "main", "run"]
