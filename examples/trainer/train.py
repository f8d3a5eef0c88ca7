"""Hugging Face's Trainer with a constant global batch, which continues in the same process when a rank is lost."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainerCallback, TrainingArguments

import elasticjob
from elasticjob.frameworks.huggingface import ElasticTrainer, ElasticTrainerCallback


def main() -> None:
    options = read_options()
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, **size))
    kept = ElasticTrainerCallback(
        global_batch=options.global_batch, commit_steps=options.commit_every, path=options.path
    )
    dataset = Sequences(options.samples)

    @elasticjob.restartable
    def train() -> None:
        """Train in one round. It is called again in the next one; what is built above stays."""
        arguments = TrainingArguments(
            output_dir=tempfile.gettempdir(),
            num_train_epochs=options.epochs,
            per_device_train_batch_size=options.max_size,  # samples of a forward pass on a worker, at most
            learning_rate=3e-3,
            logging_steps=1,
            save_strategy="no",  # the state is in memory, and in `path`
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = ElasticTrainer(
            model=model, args=arguments, train_dataset=dataset, callbacks=[kept, PrintSteps(options.step_delay)]
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()

    train()
    if torch.distributed.is_initialized():  # Trainer has created it, and leaves it
        torch.distributed.destroy_process_group()


class Sequences(torch.utils.data.Dataset):
    """Tokens that grow by the same number, modulo 64."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (index + (1 + index % 7) * torch.arange(16)) % 64
        return {"input_ids": tokens, "labels": tokens}


class PrintSteps(TrainerCallback):
    """Prints each step."""

    def __init__(self, delay: float) -> None:
        self._delay = delay

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "loss" in logs and state.is_world_process_zero:
            line = f"step={state.global_step} epoch={state.epoch:.2f} loss={logs['loss']:.6f} world={args.world_size}"
            print(f"{line} pid={os.getpid()} time={time.time():.4f}", flush=True)
        time.sleep(self._delay)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--samples", type=int, default=500, help="samples of an epoch")
    parser.add_argument("--global-batch", type=int, default=24, help="samples of a step on all workers together")
    parser.add_argument("--max-size", type=int, default=8, help="samples of a forward pass on a worker, at most")
    parser.add_argument("--commit-every", type=int, default=20, help="steps between commits")
    parser.add_argument("--path", help="file to which the state is saved when the job ends, unless it succeeds")
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to wait after each step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
