"""`torchvision.transforms.functional` by its newer name."""

from torchvision.transforms.functional import (
    InterpolationMode,
    grayscale_to_rgb,
    normalize,
    pil_to_tensor,
    resize,
)

__all__ = ["InterpolationMode", "grayscale_to_rgb", "normalize", "pil_to_tensor", "resize"]
