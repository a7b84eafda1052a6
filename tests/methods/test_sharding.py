"""FSDP, both of torch's, on one process: wrapping sees our parameters, and they get the same gradients."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
import torch.distributed as dist
from peft import get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
import inlay
from zoo import tiny

dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=0, world_size=1)
for config_class in (inlay.BiasTuningConfig, inlay.NormTuningConfig, inlay.NTKAttentionConfig):
    def build():
        model, batch = tiny("bert")
        torch.manual_seed(0)
        return get_peft_model(model, config_class()), batch
    model, batch = build()
    loss = model(**batch).loss
    loss.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    total = torch.cat([g.flatten() for g in wanted.values()]).sort().values

    model, _ = build()
    model.gradient_checkpointing_enable()
    mesh = init_device_mesh("cpu", (1,))
    for block in model.base_model.model.bert.encoder.layer:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sharded = model(**batch).loss
    sharded.backward()
    assert sharded.item() == loss.item()
    for name, p in model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.grad.full_tensor(), wanted[name])

    model, _ = build()
    flat = FullyShardedDataParallel(model, auto_wrap_policy=fsdp_auto_wrap_policy(model), device_id=torch.device("cpu"))
    sharded = flat(**batch).loss
    sharded.backward()
    assert sharded.item() == loss.item()
    trained = torch.cat([p.grad.flatten() for p in flat.parameters() if p.requires_grad])
    torch.testing.assert_close(trained.sort().values, total)
    print(config_class.__name__)
dist.destroy_process_group()
"""


def test_sharded_models_train_the_same(tmp_path: Path) -> None:
    arguments = [sys.executable, "-W", "ignore", "-c", CODE, str(Path(__file__).parents[1]), str(tmp_path / "store")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, env=os.environ | {"LOCAL_RANK": "0"})
    assert done.stdout.split() == ["BiasTuningConfig", "NormTuningConfig", "NTKAttentionConfig"], done.stderr
