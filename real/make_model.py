"""Writes a random Llama and a byte-level BPE tokenizer: make_model.py FOLDER [tiny|bigkv]. Nothing is downloaded.

tiny:  2 layers, 512 B of KV per token. bigkv: 8 layers x 8 heads x 128, 32 KiB per token, so that a transfer lasts long
enough to break something in its middle. The seed is fixed, so P, D and a lone reference answer alike; the weights are drawn
wider than usual, so that the text depends visibly on the context and a wrong KV gives a wrong text.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SHAPES = {
    "tiny": {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "bigkv": {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128},
}
VOCABULARY = 2048
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


def main(folder: str, shape: str = "tiny") -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = sorted(str(path) for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<s>", "</s>"], show_progress=False, initial_alphabet=alphabet)
    tokenizer.train(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False)
    fast.chat_template = CHAT
    fast.save_pretrained(folder)
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, initializer_range=0.2, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=1, max_position_embeddings=4096, **SHAPES[shape],
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:3])
