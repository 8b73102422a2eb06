"""Runs scenarios of trainers_test.py on one rank: `trainers_job.py SCENARIO [ARGUMENT...] + ...`.

Each trainer trains the same model on the same data as a plain loop that sees them in that trainer's order,
and must end with the same parameters.
"""

import os
import socket
import struct
import sys
import tempfile
import warnings
import zlib
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import signpost.torch as signpost
import skorch
import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, GradientState
from job import run_scenarios
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.loggers import CSVLogger
from signpost.integrations.accelerate import Accelerator
from signpost.integrations.lightning import SignpostStrategy
from signpost.integrations.transformers import Trainer
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, STEPS, SAVED_AT, LR = 4, 12, 7, 0.01
RANKS = 2
FREEZE_STEP = 4
OPTIONS = dict(freeze_step=FREEZE_STEP)
NORM = 0.05
AGGREGATORS = os.environ["SIGNPOST_AGGREGATORS"].split(",")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16000), nn.Linear(16000, 1)

    def forward(self, inputs, labels=None):
        output = self.second(self.first(inputs).tanh()).squeeze(-1)
        if labels is None:
            return output
        return {"loss": ((output - labels) ** 2).mean()}


def data_of(accumulated):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCH * RANKS * STEPS * accumulated, 16, generator=generator)
    return inputs, inputs[:, :4].sum(1)


def in_blocks(number):
    """Returns the examples of a rank's n-th batch as accelerate and Trainer share them out."""
    first = (number * RANKS + dist.get_rank()) * BATCH
    return list(range(first, first + BATCH))


def in_turns(number):
    """Returns them as torch's DistributedSampler shares them out. Lightning makes one, but shuffled."""
    return [(number * BATCH + i) * RANKS + dist.get_rank() for i in range(BATCH)]


def groups_of(model):
    named = list(model.named_parameters())
    return [
        {"params": [(n, p) for n, p in named if n.endswith("weight")], "weight_decay": 0.1},
        {"params": [(n, p) for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
    ]


def sent_to_aggregators():
    """Returns how many bytes TCP has sent over each connection of this process, by its local port."""
    sent = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(link).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as connection:
                host, port = connection.getpeername()[:2]
                if f"{host.replace('::ffff:', '')}:{port}" in AGGREGATORS:  # gRPC's are of IPv6
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 208)
                    # tcpi_bytes_sent
                    sent[connection.getsockname()[1]] = struct.unpack_from("Q", info, 200)[0]
        except OSError:  # closed by now, or not connected
            continue
    return sent


class Wire:
    """Finds out at each step of an optimizer what was sent since its step before."""

    optimizer = None
    sent = {}
    one_bit_steps = []

    @classmethod
    def look(cls, optimizer, *_):
        before, cls.sent = cls.sent, sent_to_aggregators()
        if optimizer is not cls.optimizer:
            cls.optimizer, cls.one_bit_steps = optimizer, []
        elif optimizer.steps > FREEZE_STEP:
            cls.one_bit_steps.append(sum(n - before.get(port, 0) for port, n in cls.sent.items()))

    @classmethod
    def check(cls, parameters):
        """They send one bit for each parameter, a scale for 4,096 of them, and at most 2% around that."""
        said = parameters / 8 + 4 * (parameters / 4096)
        mean = sum(cls.one_bit_steps) / len(cls.one_bit_steps)
        assert said < mean < 1.02 * said, (said, cls.one_bit_steps)


register_optimizer_step_post_hook(Wire.look)


def say(model):
    Wire.check(sum(parameter.numel() for parameter in model.parameters()))
    crc = 0
    for parameter in model.parameters():
        crc = zlib.crc32(parameter.detach().numpy().tobytes(), crc)
    print(f"parameters {crc:08x}", flush=True)


def plain(order, accumulated=1, bf16=False, norm=None):
    model = Model()
    optimizer = signpost.OneBitAdam(groups_of(model), lr=LR, max_grad_norm=norm, **OPTIONS)
    inputs, labels = data_of(accumulated)
    while optimizer.steps < STEPS:
        optimizer.zero_grad()
        for part in range(accumulated):
            batch = order(optimizer.steps * accumulated + part)
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = model(inputs[batch], labels[batch])["loss"]
            (loss / accumulated).backward()
        optimizer.step()
    say(model)
    return optimizer


def of_transformers(directory, max_steps=STEPS, accumulated=1, bf16=False, norm=None, resume=None):
    AcceleratorState._reset_state(reset_partial_state=False)
    inputs, labels = data_of(accumulated)
    examples = [{"inputs": x, "labels": y} for x, y in zip(inputs, labels)]
    arguments = transformers.TrainingArguments(
        output_dir=directory,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=accumulated,
        max_steps=max_steps,
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=0.1,
        max_grad_norm=norm or 0.0,
        bf16=bf16,
        use_cpu=True,
        ddp_backend="gloo",
        save_strategy="steps",
        save_steps=SAVED_AT,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        seed=0,
        train_sampling_strategy="sequential",
    )
    trainer = Trainer(
        Model(),
        arguments,
        train_dataset=examples,
        optimizer_cls_and_kwargs=(signpost.OneBitAdam, OPTIONS),
    )
    trainer.train(resume_from_checkpoint=resume)
    logged = [
        entry for entry in trainer.state.log_history if "signpost/bits_per_parameter" in entry
    ]
    if dist.get_rank() == 0:
        assert logged and logged[-1]["signpost/bits_per_parameter"] > 1
        assert norm is None or logged[-1]["grad_norm"] > 0
    if max_steps == STEPS:
        say(trainer.model)


def of_accelerate(directory, steps=STEPS, accumulated=1, bf16=False, norm=None, resume=None):
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=accumulated,
        mixed_precision="bf16" if bf16 else "no",
    )
    model = Model()
    optimizer = signpost.OneBitAdam(groups_of(model), lr=LR, max_grad_norm=norm, **OPTIONS)
    loader = DataLoader(TensorDataset(*data_of(accumulated)), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    done = 0
    if resume is not None:
        accelerator.load_state(resume)
        done = optimizer.optimizer.steps
    for number, (inputs, labels) in enumerate(loader):
        if number < done * accumulated:
            continue
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs, labels)["loss"])
            if accelerator.sync_gradients and norm is not None:
                accelerator.clip_grad_norm_(model.parameters(), norm)
            optimizer.step()
            optimizer.zero_grad()
        if optimizer.optimizer.steps == steps:
            break
    if steps == SAVED_AT:
        accelerator.save_state(str(Path(directory, "state")))
        return
    say(accelerator.unwrap_model(model))


class Module(LightningModule):
    def __init__(self, norm, picks_data):
        super().__init__()
        self.model, self.norm, self.picks_data = Model(), norm, picks_data

    def training_step(self, batch, _):
        assert self.optimizers().steps == self.trainer.global_step  # also of Lightning's wrapper
        if self.picks_data:
            batch = [values[in_turns(self.trainer.global_step)] for values in data_of(1)]
        return self.model(*batch)["loss"]

    def configure_optimizers(self):
        return signpost.OneBitAdam(groups_of(self.model), lr=LR, max_grad_norm=self.norm, **OPTIONS)


def of_lightning(directory, steps=STEPS, accumulated=1, bf16=False, norm=None, resume=None):
    trainer = LightningTrainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=SignpostStrategy(process_group_backend="gloo"),
        precision="bf16-mixed" if bf16 else "32-true",
        accumulate_grad_batches=accumulated,
        max_steps=steps,
        logger=CSVLogger(directory, name="log", version=""),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    )
    # Lightning begins an epoch's data anew when it resumes in the middle of it.
    module = Module(norm, picks_data=resume is not None)
    data = TensorDataset(*data_of(accumulated))
    in_order = DistributedSampler(data, RANKS, dist.get_rank(), shuffle=False)
    loader = DataLoader(data, batch_size=BATCH, sampler=in_order)
    trainer.fit(module, loader, ckpt_path=resume)
    if steps == SAVED_AT:
        trainer.save_checkpoint(Path(directory, "state.ckpt"))
        return
    if dist.get_rank() == 0:
        logged = Path(directory, "log", "metrics.csv").read_text()
        assert "signpost/bits_per_parameter" in logged
    say(module.model)


TRAINERS = {
    "transformers": (of_transformers, in_blocks),
    "accelerate": (of_accelerate, in_blocks),
    "lightning": (of_lightning, in_turns),
}
MODES = {
    "trains": {},
    "clips": dict(norm=NORM),
    "accumulates": dict(accumulated=2),
    "bf16": dict(bf16=True),
}


def trains(name, mode):
    trainer, order = TRAINERS[name]
    plain(order, **MODES[mode])
    with tempfile.TemporaryDirectory() as directory:
        trainer(directory, **MODES[mode])


def saved_in(name, directory):
    """Where that trainer has saved."""
    if name == "transformers":
        return str(Path(directory, f"checkpoint-{SAVED_AT}"))
    return str(Path(directory, "state" if name == "accelerate" else "state.ckpt"))


def resumes(name, directory, which):
    """From what each rank has saved, or from what rank 0 has saved alone."""
    trainer, order = TRAINERS[name]
    directory = Path(directory, f"{name}-{which}")
    if which == "all":
        plain(order)
    trainer(str(directory), SAVED_AT)
    dist.barrier()
    if which == "rank_0" and dist.get_rank() == 0:
        for file in [*directory.glob("**/signpost_*"), *directory.glob("*.signpost_*")]:
            file.unlink()
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(str(directory), resume=saved_in(name, directory))
    for warning in caught:
        if "has no error of rank" in str(warning.message):
            print("warned", flush=True)


def skorch_fits(directory, norm):
    """skorch needs no integration: it takes an optimizer's class, and each rank fits its own examples."""
    norm = float(norm) or None
    plain(in_blocks, norm=norm)
    mine = [example for number in range(STEPS) for example in in_blocks(number)]
    inputs, labels = (values[mine] for values in data_of(1))

    def new_net():
        return skorch.NeuralNet(
            Model,
            nn.MSELoss,
            signpost.OneBitAdam,
            optimizer__freeze_step=FREEZE_STEP,
            optimizer__max_grad_norm=norm,
            optimizer__param_groups=[
                ("*weight", {"weight_decay": 0.1}),
                ("*bias", {"weight_decay": 0.0}),
            ],
            lr=LR,
            max_epochs=1,
            batch_size=BATCH,
            train_split=None,
            verbose=0,
        )

    say(new_net().fit(inputs, labels).module_)
    net, done = new_net(), SAVED_AT * BATCH
    net.fit(inputs[:done], labels[:done])
    assert net.optimizer_.steps == SAVED_AT
    files = {
        f"f_{what}": Path(directory, f"{what}-{dist.get_rank()}")
        for what in ("params", "optimizer")
    }
    net.save_params(**files)
    resumed = new_net().initialize()
    resumed.load_params(**files)
    say(resumed.partial_fit(inputs[done:], labels[done:]).module_)


if __name__ == "__main__":
    signpost.init()
    dist.init_process_group("gloo")
    transformers.logging.set_verbosity_error()
    run_scenarios(globals(), sys.argv[1:])
