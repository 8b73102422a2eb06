"""Two threads that use one optimizer."""

import os
import random
import threading

import signpost.torch as signpost
import torch
from optimizers import ONE_BIT, set_gradients, tensors
from signpost import SignpostError
from signpost._one_call import AnotherCall

# ./signpost test has a part of the 10,000 that were tried: SCHEDULES=10000 tries as many.
SCHEDULES = int(os.environ.get("SCHEDULES", "500"))


def operations_on(optimizer, parameters, states, directory):
    def load():
        if states:
            optimizer.load_state_dict(random.choice(states))

    return {
        "step": optimizer.step,
        "state_dict": lambda: states.append(optimizer.state_dict()),
        "load_state_dict": load,
        "checkpoint": lambda: optimizer.checkpoint(directory),
        "leave": optimizer.leave,
        "read": lambda: (
            optimizer.steps,
            optimizer.is_synchronised,
            optimizer.report,
            optimizer.sent_bits,
        ),
        "state": lambda: [entry["exp_avg"].sum() for entry in optimizer.state.values()],
    }


def test_random_schedules_of_two_threads_harm_nothing(make, tmp_path):
    """Each call does its work, or is refused and says why. Each state that was returned can be loaded."""
    randomness = random.Random(7)
    states, refused, done = [], 0, 0
    optimizer = parameters = None
    for schedule in range(SCHEDULES):
        if optimizer is None:
            parameters = tensors((3000,), (5,))
            optimizer = make(signpost.OneBitAdam, parameters, lr=0.01, **ONE_BIT)
            set_gradients(parameters, schedule)
            left = []
        of_thread = operations_on(optimizer, parameters, states, str(tmp_path))
        weights = [6, 3, 2, 1, 0.1, 4, 2]
        plans = [randomness.choices(list(of_thread), weights, k=3) for _ in range(2)]
        unexpected = []
        start = threading.Barrier(2)

        def run(plan):
            nonlocal refused, done
            start.wait()
            for name in plan:
                try:
                    of_thread[name]()
                    done += 1
                    if name == "leave":
                        left.append(name)
                except AnotherCall as error:
                    assert "was called while another thread is in" in str(error)
                    refused += 1
                except (RuntimeError, SignpostError) as error:
                    if "has left its job" not in str(error):
                        unexpected.append((name, error))

        threads = [threading.Thread(target=run, args=(plan,)) for plan in plans]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive(), plans
        assert not unexpected, (plans, unexpected)
        del states[:-5]
        if left:
            optimizer = None
    assert refused > SCHEDULES / 20 and done > SCHEDULES
    for state in states:
        other = make(signpost.OneBitAdam, tensors((3000,), (5,)), lr=0.01, **ONE_BIT)
        other.load_state_dict(state)
        other.step()
        assert other.steps == int(state["state"][0]["step"]) + 1


def test_a_call_beside_another_thread_s_names_both(make, monkeypatch):
    optimizer = make(signpost.Adam, tensors((10,)))
    is_in_step, may_go_on = threading.Event(), threading.Event()

    def closure():
        is_in_step.set()
        may_go_on.wait()
        return torch.zeros(())

    stepping = threading.Thread(target=lambda: optimizer.step(closure))
    stepping.start()
    is_in_step.wait()
    try:
        optimizer.leave()
        raise AssertionError("it was not refused")
    except RuntimeError as error:
        said = str(error)
    assert optimizer.steps == 0
    may_go_on.set()
    stepping.join()
    assert said.startswith("leave() was called while another thread is in step() of this optimizer")
    assert optimizer.steps == 1
