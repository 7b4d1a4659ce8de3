"""Tokens per second of PyTorch's FSDP2 on the model of gpu_check.rs: bfloat16 parameters over float32 ones, AdamW in one pass.

    torchrun --standalone --nproc-per-node N fsdp2.py LAYERS WIDTH HEADS SEQUENCE VOCABULARY BATCH STEPS
"""

import os
import statistics
import sys
import time

try:
    import torch
    import torch.distributed as dist
    import torch.nn as nn
    import torch.nn.functional as F
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
except ImportError as error:
    sys.exit(f"PyTorch 2.6 or newer is needed for this row: {error}")


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.perceptron_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.project = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, sequence, width = x.shape
        normed = self.attention_norm(x)
        parts = [linear(normed).view(batch, sequence, self.heads, -1).transpose(1, 2)
                 for linear in (self.query, self.key, self.value)]
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.down(F.gelu(self.up(self.perceptron_norm(x))))


class Gpt(nn.Module):
    def __init__(self, layers, width, heads, sequence, vocabulary):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main():
    if len(sys.argv) != 8:
        sys.exit(__doc__)
    if not torch.cuda.is_available():
        sys.exit("PyTorch sees no GPU: torch.cuda.is_available() is False")
    layers, width, heads, sequence, vocabulary, batch, steps = map(int, sys.argv[1:])
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    torch.manual_seed(1)
    model = Gpt(layers, width, heads, sequence, vocabulary).cuda()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    taken = []
    for _ in range(steps):
        text = torch.randint(0, vocabulary, (batch, sequence + 1), device="cuda")
        dist.barrier()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        model(text[:, :-1], text[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begun)
    if dist.get_rank() == 0:
        median = statistics.median(taken[2:] or taken)
        print(f"tokens per second: {dist.get_world_size() * batch * sequence / median:.0f}")
    dist.destroy_process_group()


main()
