"""What the examples share: arguments, learning-rate schedule, the loop over steps, its report.

An example brings data, a model and a loss. What has to do with Signpost is in train() and
make_optimizer().
"""

import argparse
import math
import time
from pathlib import Path

import signpost.torch as signpost
import torch

WARM_UP = 0.05  # of the steps, in which the learning rate rises
INTERVALS = 20  # of the steps, after each of which rank 0 says how it is going
OPTIMIZERS = {
    "adam": signpost.Adam,
    "onebit_adam": signpost.OneBitAdam,
    "zero_one_adam": signpost.ZeroOneAdam,
    "lamb": signpost.OneBitLamb,  # that never freezes
    "onebit_lamb": signpost.OneBitLamb,
}
NEVER = 2**62
# The percentage of all steps before the freeze, where the optimizer does not find it by itself.
FREEZE_AT = {"zero_one_adam": 20, "onebit_lamb": 30}


def int_or_auto(text):
    return text if text == "auto" else int(text)


# Options of optimizers that freeze whose defaults are good; they are here to be tried.
OPTIONS = {
    "variance_refresh_interval": int_or_auto,
    "variance_floor": float,
    "gamma": float,
    "warm_up_codec": str,
    "codec": str,
    "variance_codec": str,
    "var_update_scaler": int,
    "local_step_scaler": int,
    "local_step_clipper": int,
    "compat": str,
}
LAMB_OPTIONS = {
    "max_coeff": float,
    "min_coeff": float,
    "coeff_beta": float,
    "factor_max": float,
    "factor_min": float,
    "factor_threshold": float,
}
# What is left of them where nothing freezes.
DENSE_OPTIONS = {"adam": {"codec"}, "lamb": {"warm_up_codec", *LAMB_OPTIONS}}


def argument_parser(description, *, steps, batch, batch_unit, learning_rate):
    """For the arguments that all examples have, with the example's own defaults."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--optimizer", choices=OPTIMIZERS, default="onebit_adam", help="[%(default)s]")
    add("--steps", type=int, default=steps, help="[%(default)s]")
    add(
        "--freeze-step",
        type=int_or_auto,
        help="dense steps, or auto [onebit_adam: auto; onebit_lamb: 30%% of the steps]; "
        "zero_one_adam: var_freeze_step [20%%]",
    )
    for name, kind in {**OPTIONS, **LAMB_OPTIONS}.items():
        add(f"--{name.replace('_', '-')}", type=kind, help="of the optimizer, if it has that")
    add("--learning-rate", type=float, default=learning_rate, help="the highest [%(default)s]")
    add("--batch", type=int, default=batch, help=f"{batch_unit} per rank and step [%(default)s]")
    add("--device", default="cpu", help="cuda: one of each rank's own [%(default)s]")
    add("--seed", type=int, default=1, help="of the first parameters and the batches")
    add("--checkpoints", help="directory to save in, and to go on from if it is there")
    add("--save-every", type=int, default=100, help="steps between two checkpoints [%(default)s]")
    add("--stop-at", type=int, help="with --checkpoints: save after so many steps, and end")
    add("--output", type=Path, default=Path("."), help="directory of loss.png")
    add("--results", type=Path, help="directory of each rank's figures, for programs; no loss.png")
    return parser


def device_of(arguments):
    """Where this rank's model goes: of the GPUs of a machine each of its ranks has another."""
    if arguments.device != "cuda":
        return torch.device(arguments.device)
    return torch.device("cuda", signpost.rank() % torch.cuda.device_count())


def train(arguments, model, loss_of_batch, validate, metric):
    """Trains the model together with all other ranks.

    Args:
        loss_of_batch: the model's mean loss on a batch that it draws by a torch.Generator, which is
            another one on each rank and at each step.
        validate: a figure of the model on data that was held out.
        metric: what that figure is, as in "validation loss {:.4f} bits per byte".
    """
    optimizer = make_optimizer(model.parameters(), arguments)
    elements = sum(parameter.numel() for parameter in model.parameters())
    progress = Progress(elements, arguments, optimizer.steps)
    if signpost.rank() == 0:
        print(f"{elements} parameters, {signpost.world_size()} workers, {arguments.optimizer}")

    with signpost.StopRequest() as stop:
        take_steps(arguments, model, loss_of_batch, validate, optimizer, progress, stop)

    progress.end(optimizer.parameters_crc32c())
    print(f"done: parameters {progress.parameters_crc32c:08x}", flush=True)
    if signpost.rank() == 0:
        print(f"sent {optimizer.sent_bits:.2f} bits per parameter and step")
    if signpost.rank() == 0 and progress.curve:
        print(metric.format(progress.curve[-1][2]), flush=True)
    if arguments.results:
        progress.write(arguments.results)
    elif signpost.rank() == 0 and progress.curve:
        progress.draw(arguments.output, metric)


def take_steps(arguments, model, loss_of_batch, validate, optimizer, progress, stop):
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: schedule(step, arguments.steps), optimizer.steps - 1
    )
    # Between synchronisations of 0/1 Adam each rank has another model. A few steps more, whose
    # learning rate is 0 where all are done, lead to the next.
    last = min(arguments.steps, arguments.stop_at or arguments.steps)
    while optimizer.steps < last or not optimizer.is_synchronised:
        # Each rank has its own part of the batch, and after a resume the same as without.
        seed = (arguments.seed << 48) + (optimizer.steps << 12) + signpost.rank()
        progress.begin_step()
        optimizer.zero_grad()
        loss = loss_of_batch(torch.Generator().manual_seed(seed))
        loss.backward()
        optimizer.step()
        # A rank that was late has taken several: learning rates must be equal on all ranks.
        while scheduler.last_epoch < optimizer.steps:
            scheduler.step()
        stop.check()
        progress.add(loss.item(), optimizer.report)
        is_due = optimizer.steps % arguments.save_every == 0 or optimizer.steps == arguments.stop_at
        if arguments.checkpoints and is_due:
            optimizer.checkpoint(arguments.checkpoints)
        if signpost.rank() == 0 and optimizer.is_synchronised and progress.is_end_of_interval():
            progress.end_interval(validation(model, validate))


def make_optimizer(parameters, arguments):
    options = {"lr": arguments.learning_rate, "betas": (0.9, 0.99)}
    if arguments.checkpoints and signpost.has_checkpoint(arguments.checkpoints):
        options["resume"] = arguments.checkpoints
    options.update(options_of(arguments))
    return OPTIMIZERS[arguments.optimizer](parameters, **options)


def options_of(arguments):
    """Of the optimizer that is named: where it freezes, and what was asked for."""
    asked = {name: getattr(arguments, name) for name in (*OPTIONS, *LAMB_OPTIONS)}
    asked = {name: value for name, value in asked.items() if value is not None}
    if arguments.optimizer in DENSE_OPTIONS:
        if arguments.freeze_step is not None:
            asked["freeze_step"] = arguments.freeze_step
        wrong = asked.keys() - DENSE_OPTIONS[arguments.optimizer]
        if wrong:
            flag = min(wrong).replace("_", "-")
            raise SystemExit(f"{arguments.optimizer} never freezes, and has no --{flag}")
        lamb = {"freeze_step": NEVER, "warm_up_codec": "fp32"}
        return {**lamb, **asked} if arguments.optimizer == "lamb" else asked
    name = "var_freeze_step" if arguments.optimizer == "zero_one_adam" else "freeze_step"
    freeze_step = freeze_step_of(arguments)
    return asked if freeze_step is None else {name: freeze_step, **asked}


def freeze_step_of(arguments):
    """None: the optimizer finds it."""
    if arguments.freeze_step is not None or arguments.optimizer not in FREEZE_AT:
        return arguments.freeze_step
    return max(1, arguments.steps * FREEZE_AT[arguments.optimizer] // 100)


def schedule(step, steps):
    """The learning rate's factor: a linear rise, then half a cosine."""
    rise = max(1, round(WARM_UP * steps))
    if step < rise:
        return (step + 1) / rise
    fall = max(1, steps - rise)
    return 0.5 * (1 + math.cos(math.pi * min(step - rise, fall) / fall))


@torch.no_grad()
def validation(model, validate):
    model.eval()
    figure = validate()
    model.train()
    return figure


class Progress:
    """What a rank has done: rank 0's lines and loss curve, and the figures that go to a file."""

    def __init__(self, elements, arguments, first_step):
        self.elements = elements
        self.steps = arguments.steps
        self.start = time.monotonic()
        self.curve = []  # (step, training loss, validation)
        self.sent_bytes, self.received_bytes = 0, 0
        # None: the first one-bit step. 0/1 Adam has some before.
        is_known = arguments.optimizer == "zero_one_adam"
        self.freeze_step = freeze_step_of(arguments) if is_known else None
        self.intervals = first_step * INTERVALS // self.steps  # that are over
        self.one_bit_steps, self.one_bit_sent_bytes, self.one_bit_received_bytes = 0, 0, 0
        self.frozen_sent_bytes = 0  # from the freeze step on
        self._begin_interval()

    def _begin_interval(self):
        self.interval_start = time.monotonic()
        self.interval_start_bytes = self.sent_bytes
        self.in_steps = 0  # seconds, without validation and checkpoints
        self.reports, self.losses = [], []

    def begin_step(self):
        self.step_start = time.monotonic()

    def add(self, loss, report):
        self.in_steps += time.monotonic() - self.step_start
        self.losses.append(loss)
        self.reports.append(report)
        if report.one_bit:
            self.freeze_step = report.step if self.freeze_step is None else self.freeze_step
            self.one_bit_steps += 1
            self.one_bit_sent_bytes += report.sent_bytes - self.sent_bytes
            self.one_bit_received_bytes += report.received_bytes - self.received_bytes
        if self.freeze_step is not None and report.step >= self.freeze_step:
            self.frozen_sent_bytes += report.sent_bytes - self.sent_bytes
        self.sent_bytes, self.received_bytes = report.sent_bytes, report.received_bytes

    def is_end_of_interval(self):
        return self._intervals_now() > self.intervals

    def _intervals_now(self):
        return min(INTERVALS, (self.reports[-1].step + 1) * INTERVALS // self.steps)

    def end_interval(self, figure):
        """Prints a line: what the steps since the last one cost."""
        seconds = time.monotonic() - self.interval_start
        wire = sum(report.wire_s for report in self.reports) / seconds
        wait = sum(report.wait_s for report in self.reports) / seconds
        in_steps = self.in_steps / seconds
        fp32_bytes = 4 * self.elements * len(self.reports)
        sent_bytes = self.sent_bytes - self.interval_start_bytes
        step, loss = self.reports[-1].step + 1, sum(self.losses) / len(self.losses)
        self.curve.append((step, loss, figure))
        print(
            f"step {step}  loss {loss:.3f}  {1000 * seconds / len(self.reports):.0f} ms "
            f"(compute {in_steps - wire - wait:.0%} wire {wire:.0%} wait {wait:.0%} "
            f"other {1 - in_steps:.0%})  "
            f"{fp32_bytes / sent_bytes:.1f}x fewer bytes  {signpost.world_size()} workers",
            flush=True,
        )
        self.intervals = self._intervals_now()
        self._begin_interval()

    def end(self, parameters_crc32c):
        self.seconds = time.monotonic() - self.start
        self.parameters_crc32c = parameters_crc32c

    def write(self, directory):
        """A line per figure, those of client/demo/worker_result.h among them."""
        figures = {
            "rank": signpost.rank(),
            "world_size": signpost.world_size(),
            "parameters": self.elements,
            "steps": self.steps,
            "one_bit_steps": self.one_bit_steps,
            "freeze_step": self.steps if self.freeze_step is None else self.freeze_step,
            "seconds": self.seconds,
            "parameters_crc32c": self.parameters_crc32c,
            "wire_sent": self.sent_bytes,
            "wire_received": self.received_bytes,
            "one_bit_wire_sent": self.one_bit_sent_bytes,
            "one_bit_wire_received": self.one_bit_received_bytes,
            "frozen_wire_sent": self.frozen_sent_bytes,
            "validation": self.curve[-1][2] if self.curve else 0,
        }
        lines = [f"{name} {value}" for name, value in figures.items()]
        lines += [f"curve {step} {loss} {figure}" for step, loss, figure in self.curve]
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"rank-{signpost.rank()}").write_text("\n".join([*lines, "end\n"]))

    def draw(self, directory, metric):
        try:
            from matplotlib.figure import Figure
        except ImportError:
            print("no loss.png: matplotlib is not installed (apt-get install python3-matplotlib)")
            return
        steps, losses, validations = zip(*self.curve)
        figure = Figure(figsize=(9, 4), tight_layout=True)
        left, right = figure.subplots(1, 2)
        left.plot(steps, losses)
        left.set(xlabel="step", ylabel="training loss")
        right.plot(steps, validations)
        right.set(xlabel="step", ylabel=metric.split(" {")[0])
        directory.mkdir(parents=True, exist_ok=True)
        figure.savefig(directory / "loss.png")
