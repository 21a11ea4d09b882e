"""Fine-tune a transformers model with LoRA (peft), sharded; write the adapters for peft.

mpirun -n 4 python examples/lora.py           # GPT-2's architecture, random weights, no download
"""

import sys

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

import zcomm
import zero

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 50
FILE = sys.argv[2] if len(sys.argv) > 2 else "adapter_model.safetensors"

with zcomm.init() as comm:
    size = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32}
    base = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0, use_cache=False))
    lora = LoraConfig(r=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    model = get_peft_model(base, lora)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    model, optimizer = zero.shard(model, optimizer, zero.Config(stage=3), comm=comm)
    for step in range(STEPS):
        tokens = (torch.randint(64, (8, 1)) + torch.arange(32)) % 64
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if comm.rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)
    state = zero.full_state_dict(model, root=0)
    if comm.rank == 0:
        adapters = get_peft_model_state_dict(model, state_dict=state)
        save_file({name: tensor.contiguous() for name, tensor in adapters.items()}, FILE)
