# SPDX-License-Identifier: BSD-3-Clause
"""An optimizer that can't be fused beside one that can."""

import torch
from common_net import Net, batch, digest, show, train
from torch.nn.functional import cross_entropy

net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, fused=True)
train(net, optimizer)
show(net, optimizer)
final = torch.optim.LBFGS(Net(1).parameters(), max_iter=3)
net = Net(1)
final = torch.optim.LBFGS(net.parameters(), max_iter=3)


def closure():
    x, y = batch(0)
    final.zero_grad()
    loss = cross_entropy(net(x), y)
    loss.backward()
    return loss


final.step(closure)
print(digest(net.parameters()))
