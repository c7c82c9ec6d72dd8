"""The user-facing language: tensors, functions, gradients, loops, strategies."""

# These modules install methods on Tensor when they are imported.
from . import numpy_names as numpy_names
from . import operators as operators
from . import other_libraries as other_libraries
from . import tape as tape
