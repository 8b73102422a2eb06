"""Training in which a part of the model has its first gradient late."""

import torch
from torch import nn


def adamw(parameters, **options):
    """torch.optim.AdamW without weight decay, which ours has none of either."""
    return torch.optim.AdamW(parameters, weight_decay=0, **options)


class TwoHeads:
    """A task with rows of an embedding and a head that have no gradient before step 300.

    All ranks draw the same batch, of which each takes its part.
    """

    LATE, STEPS, BATCH = 300, 1500, 96

    def __init__(self, make_optimizer, rank=0, world_size=1):
        self.part = slice(rank, None, world_size)
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(16, 64), nn.Tanh())
        self.first, self.second = nn.Linear(64, 8), nn.Linear(64, 8)
        self.rows = nn.Embedding(200, 16)
        self.tasks = torch.randn(16, 8), torch.randn(16, 8)
        self.of_rows = torch.randn(200, 8)
        self.random = torch.Generator().manual_seed(1)
        modules = (self.body, self.first, self.second)
        parameters = [p for module in modules for p in module.parameters()]
        self.optimizer = make_optimizer([*parameters, self.rows.weight])
        self.largest_step = 0.0

    def errors(self, rows):
        inputs = torch.randn(len(rows), 16, generator=self.random)[self.part]
        rows = rows[self.part]
        hidden = self.body(inputs + 0.1 * self.rows(rows))
        first = self.first(hidden) - torch.tanh(inputs @ self.tasks[0]) - self.of_rows[rows]
        second = self.second(hidden) - torch.tanh(inputs @ self.tasks[1])
        return (first**2).mean(), (second**2).mean()

    def train(self, lr):
        for step in range(self.STEPS):
            is_late = step >= self.LATE
            rows = torch.randint(200 if is_late else 100, (self.BATCH,), generator=self.random)
            first, second = self.errors(rows)
            self.optimizer.zero_grad()
            (first + (second if is_late else 0 * second)).backward()
            before = self.second.weight.detach().clone()
            self.optimizer.step()
            if is_late and step < self.LATE + 40:
                moved = (self.second.weight - before).abs().max().item() / lr
                self.largest_step = max(self.largest_step, moved)
        self.part = slice(None)
        with torch.no_grad():
            first, second = self.errors(torch.randint(100, 200, (4000,), generator=self.random))
        return first.item(), second.item()
