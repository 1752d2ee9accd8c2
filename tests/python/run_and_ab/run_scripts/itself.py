# SPDX-License-Identifier: BSD-3-Clause
"""A script that knows optfuse, and imports it before torch."""

import optfuse  # isort: skip
import torch
from common_net import Net, batch, show, train
from torch.nn.functional import cross_entropy

net = Net()
optimizer = optfuse.fuse(torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True), mode="backward")
train(net, optimizer)
show(net, optimizer)
print(optfuse.summary(optimizer).mode)
net = Net(1)
optimizer = torch.optim.Adagrad(net.parameters(), lr=1e-2, fused=True)
train(net, optimizer)
show(net, optimizer)


def build(wrap):
    net = Net(2)
    optimizer = wrap(torch.optim.AdamW(net.parameters(), lr=1e-2))
    x, y = batch(0)

    def iteration():
        optimizer.zero_grad()
        loss = cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return iteration


result = optfuse.ab(build, rounds=5, progress=lambda line: None)
print([(row.name, row.note, row.equal_bits) for row in result.rows])
