# SPDX-License-Identifier: BSD-3-Clause
"""Stable-Baselines3: PPO on CartPole."""

import torch
from stable_baselines3 import PPO

import optfuse

torch.set_num_threads(1)
sizes = {"n_steps": 128, "batch_size": 64, "n_epochs": 2}
options = {"optimizer_kwargs": {"eps": 1e-5, "fused": True}}
agent = PPO("MlpPolicy", "CartPole-v1", seed=0, device="cpu", policy_kwargs=options, **sizes)
optimizer = agent.policy.optimizer
optimizer = optfuse.fuse(optimizer)
agent.learn(total_timesteps=512)
policy = agent.policy
