# SPDX-License-Identifier: BSD-3-Clause
"""fairscale: OSS, which steps an optimizer inside of it, and ShardedDataParallel."""

import torch
from digits import dataset, net
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim.oss import OSS

import optfuse

store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
torch.manual_seed(0)
model = net()
sharded = OSS(model.parameters(), optim=torch.optim.AdamW, lr=3e-3, fused=True)
optimizer = sharded.optim
optimizer = optfuse.fuse(optimizer)
model = ShardedDataParallel(model, sharded)
for image, label in torch.utils.data.DataLoader(dataset, batch_size=128, shuffle=True):
    sharded.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(image), label)
    loss.backward()
    sharded.step()
