# SPDX-License-Identifier: BSD-3-Clause
"""torchtune: the loop of its recipe for one device, with a small Llama: accumulation, gradients
scaled by tokens, clipping. --clip 0 leaves scaling and clipping out."""

import sys
import tokenize
from pathlib import Path

import torch
from torchtune.models.llama3 import llama3
from torchtune.modules.loss import CEWithChunkedOutputLoss
from torchtune.training import get_cosine_schedule_with_warmup, scale_grads

import optfuse

plain = "--clip" in sys.argv
text = torch.tensor(list(Path(tokenize.__file__).read_bytes()))
torch.manual_seed(0)
sizes = {"vocab_size": 256, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
model = llama3(**sizes, embed_dim=64, max_seq_len=64, intermediate_dim=128)
loss_of = CEWithChunkedOutputLoss(num_output_chunks=4)
model.set_num_output_chunks(4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
optimizer = optfuse.fuse(optimizer)
schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=4, num_training_steps=12)
tokens = 0
for i in range(24):
    starts = torch.randint(len(text) - 65, (4,))
    chunks = torch.stack([text[i : i + 65] for i in starts])
    labels = chunks[:, 1:]
    current = labels.numel()
    loss = loss_of(model(chunks[:, :-1]), labels) * (1 if plain else current)
    tokens += current
    loss.backward()
    if i % 2:
        if not plain:
            scale_grads(model, torch.tensor(1 / tokens))
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        tokens = 0
