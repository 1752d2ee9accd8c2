# SPDX-License-Identifier: BSD-3-Clause
"""PyTorch Geometric: a graph network on graphs made from a seed, in batches of other sizes."""

import torch
from torch_geometric import seed_everything
from torch_geometric.datasets import FakeDataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATConv, GCNConv, Sequential, global_mean_pool

import optfuse

seed_everything(0)
graphs = FakeDataset(num_graphs=96, avg_num_nodes=20, num_channels=16, num_classes=4)
layers = [(GCNConv(16, 64), "x, edges -> x"), torch.nn.ReLU(), (GATConv(64, 32), "x, edges -> x")]
layers += [(global_mean_pool, "x, batch -> x"), torch.nn.Linear(32, 4)]
model = Sequential("x, edges, batch", layers)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4, fused=True)
optimizer = optfuse.fuse(optimizer)
for _ in range(2):
    for graph in DataLoader(list(graphs), batch_size=8, shuffle=True):
        optimizer.zero_grad()
        scores = model(graph.x, graph.edge_index, graph.batch)
        torch.nn.functional.cross_entropy(scores, graph.y).backward()
        optimizer.step()
