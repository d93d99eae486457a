"""The worker: a daemon, engines that sample, and environments that score.

Light as a package: only `engines.transformers` and `engines.sampler` import torch, and they
are imported in the engine process alone.
"""
