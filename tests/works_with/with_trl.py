# SPDX-License-Identifier: BSD-3-Clause
"""TRL: SFTTrainer, with the callback of Hugging Face's Trainer."""

import tokenize
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from optfuse.integrations.transformers import OptfuseCallback

letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>", "<pad>"]
tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>"
)
text = Path(tokenize.__file__).read_text()
lines = [line for line in text.splitlines() if len(line) > 20][:160]
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=258, n_positions=64, n_embd=64, n_layer=2, n_head=4))
arguments = SFTConfig(
    output_dir="out",
    max_steps=12,
    per_device_train_batch_size=8,
    max_length=64,
    use_cpu=True,
    bf16=False,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
)
trainer = SFTTrainer(
    model,
    arguments,
    train_dataset=Dataset.from_dict({"text": lines}),
    processing_class=tokenizer,
    callbacks=[OptfuseCallback()],
)
trainer.train()
