"""The names that transformers imports. vLLM decodes images with Pillow and calls none of them."""

from enum import Enum
from typing import Any


class ImageReadMode(Enum):
    RGB = "RGB"


def decode_image(*_: Any, **__: Any) -> None:
    raise RuntimeError("the torchvision of tests decodes no files")
