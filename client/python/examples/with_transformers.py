"""A small GPT-2 of Hugging Face's, trained by their Trainer on the bytes of a text.

    signpost run -n 2 -- python3 with_transformers.py --text FILE

Signpost needs the lines that are marked.
"""

import argparse
from pathlib import Path

import signpost.torch as signpost  # Signpost
import torch
from signpost.integrations.transformers import Trainer  # Signpost
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

CONTEXT = 64


class Pieces(torch.utils.data.Dataset):
    """Pieces of a text, CONTEXT bytes each."""

    def __init__(self, text):
        self.bytes = torch.tensor(list(text), dtype=torch.int64)

    def __len__(self):
        return len(self.bytes) // CONTEXT

    def __getitem__(self, number):
        piece = self.bytes[number * CONTEXT :][:CONTEXT]
        return {"input_ids": piece, "labels": piece}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, default="/usr/share/common-licenses/GPL-3")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--output", default="with_transformers")
    given = parser.parse_args()
    config = GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=2)
    arguments = TrainingArguments(
        output_dir=given.output,
        max_steps=given.steps,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        warmup_steps=given.steps // 20,
        logging_steps=max(1, given.steps // 10),
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        ddp_backend="gloo",
    )
    trainer = Trainer(
        GPT2LMHeadModel(config),
        arguments,
        train_dataset=Pieces(given.text.read_bytes()),
        optimizer_cls_and_kwargs=(signpost.OneBitAdam, {}),  # Signpost
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if losses:
        print(f"loss {losses[0]:.3f}, in the end {losses[-1]:.3f}", flush=True)


if __name__ == "__main__":
    main()
