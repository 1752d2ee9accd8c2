# SPDX-License-Identifier: BSD-3-Clause
"""Stable-Baselines3: SAC on Pendulum, three optimizers; the actor's loss leaves gradients in the
critic, too, which the critic's zero_grad() throws away."""

import torch
from stable_baselines3 import SAC

import optfuse

torch.set_num_threads(1)
options = {"net_arch": [64, 64], "optimizer_kwargs": {"fused": True}}
agent = SAC("MlpPolicy", "Pendulum-v1", seed=0, device="cpu", policy_kwargs=options)
for optimizer in (agent.actor.optimizer, agent.critic.optimizer):
    optimizer.param_groups[0]["weight_decay"] = 1e-4
    optimizer = optfuse.fuse(optimizer)
agent.learn(total_timesteps=120)
policy = agent.policy
