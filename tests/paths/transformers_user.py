"""A user of transformers sets a layout in the config of a Llama, computes a loss and generates."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from blocksparse_flash import huggingface

huggingface.register()
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=512, attention_layout="sink_window(sinks=4, window=128)",
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config, attn_implementation="blocksparse")
tokens = torch.randint(64, (1, 300))
model(tokens, labels=tokens).loss.backward()
generated = model.generate(tokens, max_new_tokens=8, do_sample=False, pad_token_id=0)
