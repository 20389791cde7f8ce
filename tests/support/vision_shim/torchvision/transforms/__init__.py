"""Names and functions of torchvision.transforms."""

from enum import Enum


class InterpolationMode(Enum):
    """The resampling methods; the values are those that `torch.nn.functional` knows."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
