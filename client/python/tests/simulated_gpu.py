"""Tensors of the CPU that play at being on a GPU, with the library of simulated_gpu_package.

PyTorch does to them at once what it would put on a GPU's current stream. So what the library has
put there before must be done: after each step, its streams are waited for.
"""

from signpost.torch import _device


class Stream:
    """The null one, which each simulated GPU has. Nothing but the library puts work there."""

    cuda_stream = 0

    def synchronize(self):
        pass


NULL_STREAM = Stream()


def put_tensors_on(gpu, set_attribute=setattr):
    """Tensors that optimizers get from now on are there; None: on the CPU."""
    set_attribute(_device, "gpu_of", lambda tensor: gpu if tensor.device.type == "cpu" else None)
    set_attribute(_device, "current_stream", lambda _: NULL_STREAM)
    for name in ("step", "finish_step"):
        take_step = getattr(_device.GpuSession, name)
        set_attribute(_device.GpuSession, name, _and_wait(take_step))


def _and_wait(take_step):
    def step(session, *arguments):
        report = take_step(session, *arguments)
        session.parameters_crc32c()
        return report

    return step
