"""What a user writes: tensors, functions, gradients, loops, strategies."""

# All that installs methods of Tensor is loaded with it.
from . import numpy_names as numpy_names
from . import operators as operators
from . import other_libraries as other_libraries
from . import tape as tape
