"""A researcher trains a small model with a window and global tokens."""

import torch

import masks
from blocksparse_flash.nn import Encoder, EncoderBlock, SelfAttention

layout = masks.longformer(512, window=64, global_tokens=[0])
blocks = [EncoderBlock(SelfAttention(64, 4, layout, rope=10000.0)) for _ in range(2)]
model = torch.nn.Sequential(torch.nn.Embedding(100, 64), Encoder(blocks), torch.nn.Linear(64, 100))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
tokens, losses = torch.randint(100, (2, 512)), []
for _ in range(10):
    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
