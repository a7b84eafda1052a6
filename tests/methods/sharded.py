"""Every method of our own under FSDP in two processes, beside one process: run by test_sharded_methods.py.

    python sharded.py FOLDER

Both processes have the same batch (some methods' losses compare its rows with each other). Every trained parameter, put
together from its shards, must have the gradient that one process has.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peft import PeftModel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from inlay.anatomy import anatomy
from inlay.errors import InlayError
from inlay.methods.attach import attach
from inlay.methods.registry import all_methods
from zoo import tiny

WORLD = 2


def built(method: str, family: str) -> tuple[PeftModel, dict[str, torch.Tensor]]:
    model, batch = tiny(family)
    torch.manual_seed(0)
    adapted = attach(model.eval(), method)
    return adapted, batch


def gradients(method: str, family: str) -> dict[str, torch.Tensor]:
    model, batch = built(method, family)
    model(**batch).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}


def sharded(method: str, family: str) -> dict[str, torch.Tensor]:
    model, batch = built(method, family)
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in anatomy(model).blocks:
        fully_shard(block.module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(**batch).loss.backward()
    return {
        name: p.grad.full_tensor() for name, p in model.named_parameters() if p.requires_grad and p.grad is not None
    }


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=WORLD)
    for name, method in all_methods().items():
        if method.tuner is None:
            continue
        for family in ("vit", "bert"):
            try:
                wanted = gradients(name, family)
            except InlayError:
                continue
            found = sharded(name, family)
            assert found.keys() == wanted.keys(), (name, family)
            for parameter, grad in wanted.items():
                assert torch.allclose(found[parameter], grad, rtol=1e-4, atol=1e-6), (name, family, parameter)
            if rank == 0:
                print(name, family, len(wanted), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    place = Path(sys.argv[1])
    child = os.fork()
    if child:
        main(0, place)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    main(1, place)
