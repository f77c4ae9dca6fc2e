"""diffusers models across ranks. diffusers itself is imported only once a model is given."""

from ithaca.diffusers.parallelize import parallelize as parallelize
