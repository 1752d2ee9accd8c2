# SPDX-License-Identifier: BSD-3-Clause
"""PEFT: LoRA beside frozen weights of a small GPT-2."""

import tokenize
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import optfuse

text = torch.tensor(list(Path(tokenize.__file__).read_bytes()))
torch.manual_seed(0)
base = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4))
adapter = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], task_type="CAUSAL_LM")
model = get_peft_model(base, adapter)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
optimizer = optfuse.fuse(optimizer)
for _ in range(15):
    starts = torch.randint(len(text) - 64, (8,))
    chunks = torch.stack([text[i : i + 64] for i in starts])
    loss = model(input_ids=chunks, labels=chunks).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
