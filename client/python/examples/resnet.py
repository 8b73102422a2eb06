"""Trains a small ResNet to read digits, images of 8 by 8 pixels, as one process or as several.

    python3 resnet.py
    signpost run -n 4 --aggregators 2 -- python3 resnet.py --optimizer onebit_adam
"""

import sys

import signpost.torch as signpost
import torch
from torch import nn

from training import argument_parser, device_of, train

HELD_OUT = 3  # one image in so many


def parse_arguments():
    parser = argument_parser(
        __doc__.splitlines()[0], steps=600, batch=32, batch_unit="images", learning_rate=2e-3
    )
    parser.add_argument("--width", type=int, default=16, help="channels at first [%(default)s]")
    return parser.parse_args()


def load_digits(device):
    """Images [n, 1, 8, 8] and their labels: those to train on, and every third, held out."""
    try:
        from sklearn import datasets
    except ImportError:
        sys.exit("the images are scikit-learn's: apt-get install python3-sklearn")
    digits = datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1).to(device) / 16
    labels = torch.tensor(digits.target).to(device)
    held_out = torch.arange(len(labels)) % HELD_OUT == 0
    return (images[~held_out], labels[~held_out]), (images[held_out], labels[held_out])


def shift(images, generator):
    """All of them by up to one pixel in each direction."""
    down, right = torch.randint(3, (2,), generator=generator).tolist()
    return nn.functional.pad(images, (1, 1, 1, 1))[:, :, down : down + 8, right : right + 8]


def normalised_convolution(inputs, outputs, size, stride=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.layers = nn.Sequential(
            normalised_convolution(inputs, outputs, 3, stride),
            nn.ReLU(),
            normalised_convolution(outputs, outputs, 3),
        )
        same = inputs == outputs and stride == 1
        self.shortcut = (
            nn.Identity() if same else normalised_convolution(inputs, outputs, 1, stride)
        )

    def forward(self, images):
        return torch.relu(self.layers(images) + self.shortcut(images))


def resnet(width):
    """He et al., Deep Residual Learning for Image Recognition, arXiv:1512.03385, section 4.2.

    As is usual without Signpost too, batch normalisation is each rank's own.
    """
    return nn.Sequential(
        normalised_convolution(1, width, 3),
        nn.ReLU(),
        Block(width, width, stride=1),
        Block(width, 2 * width, stride=2),
        Block(2 * width, 4 * width, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


def main():
    arguments = parse_arguments()
    signpost.init()
    torch.manual_seed(arguments.seed)
    device = device_of(arguments)
    (images, labels), (held_out_images, held_out_labels) = load_digits(device)
    model = resnet(arguments.width).to(device)

    def loss_of_batch(generator):
        batch = torch.randint(len(labels), (arguments.batch,), generator=generator)
        logits = model(shift(images[batch], generator))
        return nn.functional.cross_entropy(logits, labels[batch])

    def validate():
        """The fraction of images that the model reads rightly, in percent."""
        right = model(held_out_images).argmax(dim=1) == held_out_labels
        return 100 * right.float().mean().item()

    train(arguments, model, loss_of_batch, validate, "validation accuracy {:.2f} %")


if __name__ == "__main__":
    main()
