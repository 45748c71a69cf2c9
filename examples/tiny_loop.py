"""A training loop of one's own with accelerate, on a CPU within seconds; ``--never-cleared`` forgets zero_grad().

rlhf-patches rehearse -- python examples/tiny_loop.py
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    loader = torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if "--never-cleared" not in sys.argv:
                optimizer.zero_grad()
    print("weights", float(sum(each.detach().double().abs().sum() for each in model.parameters())).hex())


if __name__ == "__main__":
    main()
