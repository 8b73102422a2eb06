"""For tests of optimizers that ask for it."""

import pytest
import signpost.torch as signpost


@pytest.fixture(scope="module")
def world():
    return signpost.init()


@pytest.fixture
def make(world):
    """Makes optimizers that leave their jobs when the test is over."""
    made = []

    def make(optimizer, *args, **kwargs):
        made.append(optimizer(*args, **kwargs))
        return made[-1]

    yield make
    for optimizer in made:
        optimizer.leave()
