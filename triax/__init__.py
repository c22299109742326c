"""The whole Kimi K3 stack: train, post-train, quantise and serve frontier agent models."""

__version__ = "0.1.0"
