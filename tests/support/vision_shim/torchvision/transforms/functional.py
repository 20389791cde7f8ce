"""The functions of images that transformers' processors call, on tensors of [..., C, H, W]."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

from torchvision.transforms import InterpolationMode

__all__ = [
    "InterpolationMode",
    "grayscale_to_rgb",
    "normalize",
    "pil_to_tensor",
    "resize",
    "to_pil_image",
]


def pil_to_tensor(image: Image.Image) -> torch.Tensor:
    """uint8 of [C, H, W]."""
    values = np.array(image, dtype=np.uint8)
    values = values[:, :, None] if values.ndim == 2 else values
    return torch.from_numpy(values).permute(2, 0, 1).contiguous()


def to_pil_image(image: torch.Tensor) -> Image.Image:
    """Of uint8 of [C, H, W]."""
    return Image.fromarray(image.permute(1, 2, 0).numpy())


def resize(
    image: torch.Tensor,
    size: Sequence[int],
    interpolation: InterpolationMode = InterpolationMode.BILINEAR,
    antialias: bool = True,
) -> torch.Tensor:
    """To (height, width). Integers are rounded and kept in range."""
    if tuple(image.shape[-2:]) == tuple(size):
        return image
    values = torch.nn.functional.interpolate(
        image.to(torch.float32), tuple(size), mode=interpolation.value, antialias=antialias
    )
    return values.round().clamp(0, 255).to(image.dtype) if image.dtype == torch.uint8 else values


def normalize(
    image: torch.Tensor,
    mean: torch.Tensor | Sequence[float],
    std: torch.Tensor | Sequence[float],
    inplace: bool = False,
) -> torch.Tensor:
    """`(image - mean) / std` by channel; always a new tensor, whatever `inplace` says."""
    del inplace
    shape = (-1, 1, 1)
    middle = torch.as_tensor(mean, dtype=image.dtype).reshape(shape)
    return (image - middle) / torch.as_tensor(std, dtype=image.dtype).reshape(shape)


def grayscale_to_rgb(image: torch.Tensor) -> torch.Tensor:
    return image if image.shape[-3] == 3 else image.repeat_interleave(3, dim=-3)
