# SPDX-License-Identifier: BSD-3-Clause
"""Two optimizers, of which one steps twice as often, in a function, so that they are gone when the
script ends."""

import torch
from torch import nn

torch.set_num_threads(1)


def score(maker, critic, sign):
    fake, real = maker(torch.randn(32, 8)), torch.randn(32, 4) * 2 + 1
    return sign * (critic(fake).mean() - critic(real).mean())


def main():
    maker = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    slow = torch.optim.RMSprop(maker.parameters(), lr=1e-3, foreach=True)
    often = torch.optim.Adam(critic.parameters(), lr=1e-3, fused=True)
    for step in range(20):
        often.zero_grad()
        score(maker, critic, 1).backward()
        often.step()
        if step % 2:
            slow.zero_grad()
            score(maker, critic, -1).backward()
            slow.step()


main()
