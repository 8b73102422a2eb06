"""Runs scenarios of ranks_test.py on one rank: `job.py SCENARIO [ARGUMENT...]`.

`job.py SCENARIO [ARGUMENT...] + SCENARIO [ARGUMENT...]` runs several in one process, one after the
other: importing PyTorch takes longer than most of them do. NumPy is not to be had here: PyTorch does not need it.
"""

import ctypes
import os
import signal
import sys
import time
import zlib
from pathlib import Path

if __name__ == "__main__":
    sys.modules["numpy"] = None  # type: ignore[assignment]  # importing it fails

import signpost.torch as signpost
import torch
from signpost import InvalidArgumentError
from torch import nn


def crc32_of(tensor, crc=0):
    values = tensor.detach().float().contiguous()
    return zlib.crc32(ctypes.string_at(values.data_ptr(), values.nbytes), crc)


def say(optimizer):
    """Prints the optimizer's step and the checksum of its parameters, as one whole line."""
    print(f"steps {optimizer.steps} parameters {optimizer.parameters_crc32c():08x}", flush=True)


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(50, 100), nn.Tanh(), nn.Linear(100, 1))


def gradients_of(model, step, rank):
    """The loss's gradients on the data of a step and rank."""
    generator = torch.Generator().manual_seed(step * 100 + rank)
    inputs = torch.randn(16, 50, generator=generator)
    loss = ((model(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean()
    return torch.autograd.grad(loss, list(model.parameters()))


def set_gradients(model, gradients):
    for parameter, gradient in zip(model.parameters(), gradients):
        parameter.grad = gradient


def use_small_chunks(set_attribute=setattr):
    """Jobs that begin from now on have so many chunks that not all are under way at once."""
    next_job = signpost.World.next_job

    def next_small_job(world, name=None):
        options = next_job(world, name)
        options.block_elements, options.chunk_elements = 64, 128
        return options

    set_attribute(signpost.World, "next_job", next_small_job)


def average():
    """Adam on all ranks is AdamW on the mean of their gradients."""
    model, reference = model_of(), model_of()
    ours = signpost.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.01, weight_decay=0.1)
    ranks = range(signpost.world_size())
    for step in range(20):
        by_rank = [gradients_of(model, step, rank) for rank in ranks]
        set_gradients(model, by_rank[signpost.rank()])
        set_gradients(reference, [sum(g) / len(ranks) for g in zip(*by_rank)])
        ours.step()
        theirs.step()
        with torch.no_grad():
            for a, b in zip(model.parameters(), reference.parameters()):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6 * 0.01)
                b.copy_(a)
    say(ours)


def one_bit_adam(parameters, **options):
    return signpost.OneBitAdam(parameters, lr=0.01, freeze_step=10, **options)


def zero_one_adam(parameters, **options):
    """Ranks synchronise after each step until step 10, then after two, and from step 14 on after
    four: not after 16 and 21, but after 30."""
    return signpost.ZeroOneAdam(
        parameters,
        lr=0.01,
        var_freeze_step=6,
        var_update_scaler=2,
        local_step_scaler=4,
        local_step_clipper=4,
        **options,
    )


def one_bit_lamb(parameters, **options):
    return signpost.OneBitLamb(parameters, lr=0.01, freeze_step=10, **options)


OPTIMIZERS = {
    "one_bit_adam": one_bit_adam,
    "one_bit_lamb": one_bit_lamb,
    "zero_one_adam": zero_one_adam,
}


def variance_options(kind, interval):
    """That bring the variance up to date in fp32, and in int8, and at an interval if that is free."""
    if kind == "zero_one_adam":
        return {"variance_codec": "int8"}
    codec = "fp32" if kind == "one_bit_adam" else "int8"
    return {"variance_refresh_interval": interval, "variance_codec": codec}


def train(kinds="one_bit_adam", directory=None, dies_at=None):
    """Takes thirty steps with each kind of optimizer ("one_bit_adam,one_bit_lamb"), in turns.

    With a directory each optimizer saves every seventh step in a directory of its own, and resumes.
    """
    models = {kind: model_of() for kind in kinds.split(",")}
    optimizers = {}
    for kind, model in models.items():
        own = f"{directory}/{kind}"
        resume = own if directory and os.path.exists(own) else None
        options = variance_options(kind, interval=6)
        optimizers[kind] = OPTIMIZERS[kind](model.parameters(), resume=resume, **options)
        if resume:
            print(f"goes on from step {optimizers[kind].steps}", flush=True)
    first_step = next(iter(optimizers.values())).steps
    for step in range(first_step, 30):
        if step == int(dies_at or 30) and signpost.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for kind, optimizer in optimizers.items():
            assert optimizer.steps == step
            set_gradients(models[kind], gradients_of(models[kind], step, signpost.rank()))
            optimizer.step()
            if directory and optimizer.steps % 7 == 0:
                optimizer.checkpoint(f"{directory}/{kind}")
    for optimizer in optimizers.values():
        say(optimizer)


def as_deepspeed():
    """DeepSpeed's 1-bit Adam, in double precision, as far as docs/algorithms.md says that it is
    followed."""
    freeze, beta1, beta2, eps, lr, decay = 6, 0.9, 0.999, 1e-8, 0.01, 0.1
    ranks, shapes = range(signpost.world_size()), ((30, 20), (500,), (7,), ())

    def numbers(seed):
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(shape, generator=generator) for shape in shapes]

    def zeros():
        return [torch.zeros(shape).double() for shape in shapes]

    def compress(u):
        return torch.copysign(u.norm() / u.numel() ** 0.5, u)

    def compressed_allreduce(m, errors, t):
        """`m` by rank; the last error is the server's."""
        sent = [compress(m[rank] + errors[rank][t]) for rank in ranks]
        for rank in ranks:
            errors[rank][t] += m[rank] - sent[rank]
        mean = sum(sent) / len(ranks) + errors[-1][t]
        errors[-1][t] = mean - compress(mean)
        return compress(mean)

    model = [nn.Parameter(values) for values in numbers(0)]
    optimizer = signpost.OneBitAdam(
        model, lr=lr, weight_decay=decay, freeze_step=freeze, compat="deepspeed"
    )
    wanted = [values.double() for values in numbers(0)]
    m, v, errors = zeros(), zeros(), [zeros() for _ in (*ranks, "server")]
    for step in range(20):
        gradients = [numbers(1000 + 100 * step + rank) for rank in ranks]
        for parameter, gradient in zip(model, gradients[signpost.rank()]):
            parameter.grad = gradient
        optimizer.step()
        assert optimizer.report.one_bit == (step >= freeze)
        for t, parameter in enumerate(model):
            by_rank = [gradient[t].double() for gradient in gradients]
            if step >= freeze:
                moved = [beta1 * m[t] + (1 - beta1) * g for g in by_rank]
                m[t] = compressed_allreduce(moved, errors, t)
            elif step > 0:
                g = sum(by_rank) / len(ranks)
                m[t] = beta1 * m[t] + (1 - beta1) * g
                v[t] = beta2 * v[t] + (1 - beta2) * g * g
            if step > 0:
                update = m[t] / (v[t].sqrt() + eps) + decay * wanted[t]
                wanted[t] = wanted[t] - lr * update
            torch.testing.assert_close(parameter.detach(), wanted[t].float(), rtol=1e-5, atol=1e-6)
    say(optimizer)


def dies_once(directory, max_grad_norm="0"):
    """Thirty steps in bf16, of which ten dense; rank 1 dies in the middle, unless it has."""
    has_died = Path(directory, "has_died")
    model = model_of().bfloat16()
    optimizer = signpost.OneBitAdam(
        model.parameters(), lr=0.01, freeze_step=10, max_grad_norm=float(max_grad_norm) or None
    )
    print(f"begins at step {optimizer.steps}", flush=True)
    while optimizer.steps < 30:
        if signpost.rank() == 1 and optimizer.steps == 17 and not has_died.exists():
            has_died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(optimizer.steps * 100 + signpost.rank())
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()
        optimizer.step()
    say(optimizer)


def tries_again(refused=""):
    """Four steps, clipped. With an argument rank 1 alone is refused the second and the third, and
    takes them with the gradients that are there, and with new ones."""
    weights, biases = (nn.Parameter(torch.zeros(shape)) for shape in ((24, 10), (10,)))
    optimizer = signpost.OneBitAdam(
        [{"params": [weights]}, {"params": [biases]}],
        freeze_step=3,
        warm_up_codec="bf16",
        max_grad_norm=0.5,
    )

    def backward():
        generator = torch.Generator().manual_seed(optimizer.steps * 100 + signpost.rank())
        for parameter in (weights, biases):
            parameter.grad = torch.randn(parameter.shape, generator=generator)

    while optimizer.steps < 4:
        backward()
        if refused and signpost.rank() == 1 and optimizer.steps in (1, 2):
            optimizer.param_groups[1]["betas"] = (0.8, 0.999)
            try:
                optimizer.step()
            except InvalidArgumentError as error:
                print(f"refused: {error}", flush=True)
            optimizer.param_groups[1]["betas"] = (0.9, 0.999)
            if optimizer.steps == 2:
                backward()
        optimizer.step()
    say(optimizer)


def saves_alone(directory):
    """Takes thirty steps with each kind of optimizer. After step 16 each rank saves its optimizers in
    files of its own."""
    for kind, optimizer_of in OPTIMIZERS.items():
        model = model_of()
        optimizer = optimizer_of(model.parameters())
        while optimizer.steps < 30:
            set_gradients(model, gradients_of(model, optimizer.steps, signpost.rank()))
            optimizer.step()
            if optimizer.steps == 16:
                assert optimizer.is_synchronised == (kind != "zero_one_adam")
                file = Path(directory, f"{kind}-{signpost.rank()}")
                torch.save((optimizer.state_dict(), model.state_dict()), file)
        say(optimizer)


def goes_on_from_file(directory):
    """Takes the steps after saves_alone()'s step 16."""
    for kind, optimizer_of in OPTIMIZERS.items():
        model = model_of()
        optimizer = optimizer_of(model.parameters())
        load(Path(directory, f"{kind}-{signpost.rank()}"), optimizer, model)
        assert optimizer.steps == 16
        while optimizer.steps < 30:
            set_gradients(model, gradients_of(model, optimizer.steps, signpost.rank()))
            optimizer.step()
        say(optimizer)


def load(file, optimizer, model):
    of_optimizer, of_model = torch.load(file, weights_only=True)
    optimizer.load_state_dict(of_optimizer)
    model.load_state_dict(of_model)


def loads_file_of_rank_0(directory):
    """Goes on from what rank 0 has saved in saves_alone(), on each rank."""
    model = model_of()
    optimizer = one_bit_adam(model.parameters())
    load(Path(directory, "one_bit_adam-0"), optimizer, model)
    while optimizer.steps < 30:
        set_gradients(model, gradients_of(model, optimizer.steps, signpost.rank()))
        optimizer.step()
    errors = torch.cat([entry["error"].flatten() for entry in optimizer.state.values()])
    print(f"error {errors.norm():.3g}", flush=True)
    say(optimizer)


def loads_states_of_different_steps():
    model = model_of()
    optimizer = one_bit_adam(model.parameters())
    states = []
    while optimizer.steps < 4:
        set_gradients(model, gradients_of(model, optimizer.steps, signpost.rank()))
        optimizer.step()
        states.append(optimizer.state_dict())
    optimizer.load_state_dict(states[1 if signpost.rank() == 1 else 2])
    optimizer.step()


def comes_back(directory, kind="one_bit_adam"):
    """Rank 1 dies, and is started again while rank 0 trains on; with bf16 parameters. With 0/1 Adam
    each rank clips its own gradients, from the beginning."""
    has_died, is_back = Path(directory, "has_died"), Path(directory, "is_back")
    model = model_of().bfloat16()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    clips = {"max_grad_norm": 1.0} if kind == "zero_one_adam" else {}
    optimizer = OPTIMIZERS[kind](model.parameters(), **clips)
    if signpost.rank() == 1 and has_died.exists():
        assert optimizer.steps > 0
        for parameter, old in zip(model.parameters(), before):
            assert not torch.equal(parameter, old), "it has not got the others' values"
        is_back.write_text(str(optimizer.steps + 20))

    def is_over():
        steps = int(is_back.read_text() or 2**40) if is_back.exists() else 2**40
        return optimizer.steps >= steps and optimizer.is_synchronised

    while not is_over():
        if signpost.rank() == 1 and optimizer.steps == 12:
            has_died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1 + signpost.rank())
        optimizer.step()
        if kind == "zero_one_adam":
            own = (1 + signpost.rank()) * sum(p.numel() for p in model.parameters()) ** 0.5
            assert abs(optimizer.grad_norm / own - 1) < 1e-5
        time.sleep(0.01)  # computing
    say(optimizer)


def overlap(*overlapping):
    """Takes thirty steps with each kind of optimizer, and for each of `overlapping` again. "02" has
    overlap on ranks 0 and 2, and "none" on no rank."""
    use_small_chunks()
    rank = signpost.rank()
    for kind, optimizer_of in OPTIMIZERS.items():
        options = variance_options(kind, interval=7)
        for ranks in overlapping:
            model = model_of()
            optimizer = optimizer_of(model.parameters(), overlap=str(rank) in ranks, **options)
            while optimizer.steps < 30:
                generator = torch.Generator().manual_seed(optimizer.steps * 100 + rank)
                inputs = torch.randn(16, 50, generator=generator)
                optimizer.zero_grad()
                ((model(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean().backward()
                optimizer.step()
            say(optimizer)


def reduce():
    """The ranks' means and sums, in every codec; and the bits of the last results."""
    ranks = range(signpost.world_size())
    inputs = [torch.rand(3, 1000, generator=torch.Generator().manual_seed(r)) - 0.5 for r in ranks]
    mine, mean = inputs[signpost.rank()], sum(inputs) / len(ranks)
    torch.testing.assert_close(signpost.all_reduce(mine.clone()), mean, rtol=1e-6, atol=1e-6)
    total = signpost.all_reduce(mine.clone(), op="sum")
    torch.testing.assert_close(total, len(ranks) * mean, rtol=1e-6, atol=1e-6)
    crc = 0
    for codec in ("bf16", "onebit"):
        sent = torch.zeros_like(mean)
        for _ in range(200):
            result = signpost.all_reduce(mine.clone(), codec, name=f"mean in {codec}")
            sent += result
        assert (sent / 200 - mean).abs().max() < 0.05
        crc = crc32_of(result, crc)
    print(f"parameters {crc:08x}", flush=True)


def late_head():
    """A head and rows of an embedding that have no gradient before step 300 end as with AdamW."""
    from two_heads import TwoHeads, adamw

    lr = 3e-3
    theirs = TwoHeads(lambda parameters: adamw(parameters, lr=lr)).train(lr)
    made = []

    def make_optimizer(parameters):
        made.append(signpost.OneBitAdam(parameters, lr=lr, freeze_step=225))
        return made[0]

    ours = TwoHeads(make_optimizer, signpost.rank(), signpost.world_size())
    rows, head = ours.train(lr)
    assert rows < 1.1 * theirs[0], (rows, theirs)
    assert head < 1.1 * theirs[1], (head, theirs)
    assert 0.1 < ours.largest_step < 2, "the first steps of the head, in learning rates"
    say(made[0])


def thaws():
    """A weight that is thawed after the freeze, and a bias that is added, are learnt as by AdamW."""

    def train(make_optimizer, ranks):
        model = model_of()
        hidden, output = model[0], model[2]
        hidden.weight.requires_grad_(False)
        optimizer = make_optimizer([hidden.weight, *output.parameters()])
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(6000, 50, generator=generator)
        wanted = inputs.sum(1, keepdim=True) + 5 * torch.randn(6000, 1, generator=generator)
        for step in range(300):
            if step == 100:
                hidden.weight.requires_grad_()
            if step == 110:
                optimizer.add_param_group({"params": [hidden.bias], "lr": 5e-4})
            model.zero_grad()
            for rank in ranks:
                mine = slice(rank, None, signpost.world_size())
                loss = ((model(inputs[mine]) - wanted[mine]) ** 2).mean()
                (loss / len(ranks)).backward()
            optimizer.step()
        assert set(optimizer.state) == {hidden.weight, hidden.bias, *output.parameters()}
        return ((model(inputs) - wanted) ** 2).mean().item(), optimizer

    def adamw(parameters):
        return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0)

    def one_bit_adam(parameters):
        return signpost.OneBitAdam(parameters, lr=1e-3, max_grad_norm=100.0)

    theirs, _ = train(adamw, range(signpost.world_size()))
    ours, optimizer = train(one_bit_adam, [signpost.rank()])
    print(f"loss {ours:.4g}, of AdamW {theirs:.4g}")
    assert ours < 1.01 * theirs
    say(optimizer)


def two_tensors():
    """client/examples/two_tensors.c."""
    weights, biases = (nn.Parameter(torch.zeros(shape)) for shape in ((24, 10), (10,)))
    optimizer = signpost.OneBitAdam(
        [{"params": [weights]}, {"params": [biases]}],
        betas=(0.9, 0.99),
        freeze_step=80,
        variance_refresh_interval=0,
        warm_up_codec="fp32",
    )
    for step in range(400):
        for parameter in (weights, biases):
            parameter.grad = parameter.detach() - signpost.rank()
        learning_rate = 0.05 * (1 - step / 400)
        optimizer.param_groups[0]["lr"] = learning_rate
        optimizer.param_groups[1]["lr"] = 0.5 * learning_rate
        optimizer.step()
    say(optimizer)


def other_seed():
    """The ranks begin apart, in several types and layouts, and go on together."""
    model = model_of(seed=signpost.rank())
    with torch.no_grad():
        model[2].to(torch.bfloat16)
        model[0].weight.data = model[0].weight.data.t().contiguous().t()
    wanted = [p.clone() for p in model.parameters()]
    optimizer = signpost.OneBitAdam(model.parameters(), freeze_step=2)
    same = all(torch.equal(p, w) for p, w in zip(model.parameters(), wanted))
    assert same == (signpost.rank() == 0)
    for step in range(4):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, signpost.rank() - step)
        optimizer.step()
    crc = 0
    for parameter in model.parameters():
        crc = crc32_of(parameter, crc)
    print(f"parameters {crc:08x}", flush=True)


def not_finite():
    model = model_of()
    with torch.no_grad():
        model[2].bias.fill_(float("inf") if signpost.rank() == 0 else 0.0)
    signpost.Adam(model.parameters())


def clipped():
    """Every rank's gradients are multiplied by the factor of their common norm."""
    model, reference = model_of(), model_of()
    ours = signpost.Adam(model.parameters(), lr=0.01, max_grad_norm=0.5)
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.01, weight_decay=0)
    ranks = range(signpost.world_size())
    for step in range(5):
        by_rank = [gradients_of(model, step, rank) for rank in ranks]
        squares = [sum(g.double().square().sum().item() for g in of_rank) for of_rank in by_rank]
        norm = (sum(squares) / len(ranks)) ** 0.5
        factor = min(1, 0.5 / (norm + 1e-6))
        assert factor < 1
        set_gradients(model, by_rank[signpost.rank()])
        set_gradients(reference, [factor * sum(g) / len(ranks) for g in zip(*by_rank)])
        if step == 4 and signpost.rank() == 0:
            time.sleep(3)
        ours.step()
        if step == 4 and signpost.rank() > 0:
            assert ours.report.wait_s > 0.5, "the norms waited for rank 0"
        theirs.step()
        assert abs(ours.grad_norm / norm - 1) < 1e-6
        with torch.no_grad():
            for a, b in zip(model.parameters(), reference.parameters()):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6 * 0.01)
                b.copy_(a)
    say(ours)


def clipped_alone():
    """With 0/1 Adam so until its step 6, and from then on by the factor of each rank's own."""
    model, ranks = model_of(), range(signpost.world_size())
    optimizer = zero_one_adam(model.parameters(), max_grad_norm=0.5)
    for step in range(14):
        by_rank = [[(1 + rank) * g for g in gradients_of(model_of(), step, rank)] for rank in ranks]
        norms = [
            sum(g.double().square().sum().item() for g in of_rank) ** 0.5 for of_rank in by_rank
        ]
        norm = (sum(norm**2 for norm in norms) / len(ranks)) ** 0.5
        if step >= 6:
            norm = norms[signpost.rank()]
        mine = by_rank[signpost.rank()]
        wanted = [0.5 / (norm + 1e-6) * g for g in mine]
        set_gradients(model, mine)
        optimizer.step()
        assert abs(optimizer.grad_norm / norm - 1) < 1e-6
        for parameter, gradient in zip(model.parameters(), wanted):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-8)
    say(optimizer)


def looks_too_early(directory):
    """Three steps, clipped; saves after each in a directory of its own, and resumes from the second.
    Rank 0 looks first when there is only the first, and is started again."""
    saved = [Path(directory, f"step-{steps}") for steps in (1, 2, 3)]
    has_looked = Path(directory, "has_looked")
    is_early = signpost.rank() == 0 and not has_looked.exists()
    is_saved = signpost.checkpoint_step(saved[1]) == 2
    resume = saved[0 if is_early else 1] if is_saved else None
    model = model_of()
    try:
        optimizer = signpost.Adam(model.parameters(), resume=resume, max_grad_norm=0.5)
    except signpost.SignpostError as error:
        if not is_early or error.exit_code != 75:
            raise
        print(f"again: {error}", flush=True)
        has_looked.touch()
        os.execv(sys.executable, [sys.executable, *sys.argv])
    if resume:
        print(f"goes on from step {optimizer.steps}", flush=True)
    for to in saved[optimizer.steps :]:
        set_gradients(model, gradients_of(model, optimizer.steps, signpost.rank()))
        optimizer.step()
        optimizer.checkpoint(to)
    say(optimizer)


def clipped_apart():
    signpost.Adam(model_of().parameters(), max_grad_norm=1.0 + signpost.rank())


def other_model():
    signpost.Adam(nn.Linear(10, 3 + signpost.rank()).parameters())


def fails():
    optimizer = signpost.Adam(model_of().parameters())
    optimizer.step()
    if signpost.rank() == 1:
        raise ValueError("the data is bad")
    optimizer.step()


def run_scenarios(scenarios, words):
    """Runs `SCENARIO [ARGUMENT...] + SCENARIO [ARGUMENT...]`, of functions by name."""
    next_job = signpost.World.next_job
    while words:
        end = words.index("+") if "+" in words else len(words)
        scenario, *arguments = words[:end]
        print("scenario", *words[:end], flush=True)
        scenarios[scenario](*arguments)
        signpost.World.next_job = next_job  # without the small chunks of the scenario
        words = words[end + 1 :]


if __name__ == "__main__":
    signpost.init()
    run_scenarios(globals(), sys.argv[1:])
