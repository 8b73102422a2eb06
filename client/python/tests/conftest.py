"""For tests that ask for it."""

import pytest


@pytest.fixture
def make():
    """Makes optimizers that leave their jobs when the test is over."""
    made = []

    def make(optimizer, *args, **kwargs):
        made.append(optimizer(*args, **kwargs))
        return made[-1]

    yield make
    for optimizer in made:
        optimizer.leave()
