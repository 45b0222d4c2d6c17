"""A DeepSeek-class checkpoint writes through torch.ops.mla.decode.

python examples/transformers_generate.py /path/to/DeepSeek-V2-Lite-Chat "Why is the sky blue?"
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from mla_ops.integrations.transformers import LatentCache, enable

path, question = sys.argv[1:]
device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(device)
enable(model, cache_dtype="fp8")  # or "auto", for a cache of the model's dtype
ids = tokenizer(question, return_tensors="pt").to(device)
cache = LatentCache(model)  # generate makes one by itself; this one can be asked
model.generate(**ids, past_key_values=cache, max_new_tokens=200, streamer=TextStreamer(tokenizer))
print(f"{cache.get_seq_length()} tokens in {cache.nbytes / 1e6:.1f} MB of cache")
