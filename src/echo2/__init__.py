"""echo2: asynchronous reinforcement learning over cheap, far and unreliable workers."""

__version__ = "0.1.0"
