"""What transformers' image processors need of torchvision, for engines of tests on the CPU.

The torchvision of PyPI is linked against CUDA and cannot be imported beside a CPU build of PyTorch.
A test puts the folder above this one on the PYTHONPATH of its engines, and nowhere else.
"""

__version__ = "0.0"
