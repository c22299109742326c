"""The Kimi K3 model family: train it, read and convert its released weights, serve it, give its agents computers."""

__version__ = "0.1.0"
